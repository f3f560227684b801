"""The web site's parts that need no browser: what is plain, live elements, exercises cut out.

`site/tests/` has what needs one.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from order import TORCH_FREE

SITE = Path(__file__).resolve().parent.parent / "site"
sys.path[:0] = [str(SITE), str(SITE / "tests")]

from builder.paths import lessons  # noqa: E402
from builder.plain import modules, plain_modules  # noqa: E402
from builder.slices import Exercise, exercises, holed, sliced  # noqa: E402
from element_values import some_values  # noqa: E402
from live import page  # noqa: E402
from live.scheduler import frames, parsed  # noqa: E402

ONLY_THE_STANDARD_LIBRARY = """
import importlib, importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("minillm", "live"):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, SITE)
"""


def blocked(code: str, given: object = None) -> object:
    """What `code` prints as JSON, in an interpreter where nothing third-party can be imported."""
    program = f"SITE = {str(SITE)!r}\n{ONLY_THE_STANDARD_LIBRARY}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(given), capture_output=True, text=True,
        cwd=SITE.parent, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_plain_modules_import_and_no_other_does():
    code = """
found = []
for name in json.load(sys.stdin):
    before = set(sys.modules)
    try:
        importlib.import_module(name)
        found.append(name)
    except ModuleNotFoundError as error:
        assert "blocked" in str(error), error
        for new in set(sys.modules) - before:
            del sys.modules[new]
print(json.dumps(found))
"""
    assert sorted(blocked(code, sorted(modules()))) == list(plain_modules())
    assert {f"minillm.{name}" for name in TORCH_FREE} <= set(plain_modules())


# Live elements


@pytest.mark.parametrize("name", [name for name in page.ELEMENTS if name != "load"])
@pytest.mark.parametrize("seed", range(8))
def test_elements_draw_or_refuse_in_a_sentence(name, seed):
    values = some_values(name, seed)
    html = page.answer(name, values, 760)
    assert html.startswith("<") and "nan" not in html and "Traceback" not in html
    assert any(f'class="{kind}"' in html for kind in ("drawn", "headline", "refused"))
    assert html == page.answer(name, values, 760)


def test_a_load_test_and_what_it_refuses():
    first = list(page.answers("load", {"model": "smollm2-135m", "places": 8}, 760))
    assert len(first) == 8 and "knee predicted" in first[-1] and "Goodput" in first[-1]
    assert "does not fit on one h100" in page.answer("load", {"model": "llama-2-70b"}, 760)


def test_controls_and_first_pictures():
    for name, element in page.ELEMENTS.items():
        html = page.placed(name)
        assert "refused" not in html and html.count("<svg") >= 2 * (name != "headline"), name
        for control in element.controls:
            assert f'name="{control.name}"' in html
    assert "Give 1 to 16 requests" in page.answer("scheduler", {"requests": "many"}, 760)


def test_the_scheduler_of_the_lesson():
    """Eight requests in four places: 10 steps continuously and 13 in static batches."""
    pairs = parsed("2+2 2+7 2+3 2+4 2+5 2+1 2+6 2+2")
    for policy, steps in (("continuous", 10), ("static", 13)):
        made = frames(pairs, policy, True, 4, 16, 24, 4)
        assert len(made) == steps and sum(len(frame.ends) for frame in made) == 8
    crowded = frames([(8, 30), (12, 28)], "continuous", True, 4, 16, 12, 4)
    assert sum(len(frame.sent_back) for frame in crowded)


# Exercises


ALL = [exercise for path in lessons() for exercise in exercises(path)]
IN_PAGE = [exercise for exercise in ALL if exercise.in_page]
RUN = "from live.page import run_exercise; print(run_exercise(*json.load(sys.stdin)))"


def test_how_many_exercises_run_in_the_page():
    assert len(IN_PAGE) >= 25, {e.name: e.needs for e in ALL if not e.in_page}


def ids(exercise: Exercise) -> str:
    return f"{exercise.lesson[:2]}-{exercise.name}"


@pytest.mark.parametrize("exercise", IN_PAGE, ids=ids)
def test_the_hole_fails_and_the_solution_passes(exercise):
    failed = blocked(RUN, [exercise.before, exercise.hole, exercise.check])
    assert not failed["passed"] and "NotImplementedError" in failed["error"]
    passed = blocked(RUN, [exercise.before, exercise.solution, exercise.check])
    assert passed["passed"], passed
    assert passed["printed"] == exercise.output


def test_slices_keep_what_is_needed_as_it_was_last_bound():
    cells = [
        "import math, os\nx, y = 1, 2\nrows = []",
        "def f(n):\n    return n + x\ny = 5",
        "for i in range(3):\n    rows.append(i)\nz = os.getcwd()",
        "x = 7\nprint(z)",
    ]
    cut = sliced(cells, "for i in rows:\n    assert f(i) == i + 7\nprint(y)")
    assert cut.splitlines() == [
        "rows = []", "def f(n):", "    return n + x", "y = 5", "for i in range(3):",
        "    rows.append(i)", "x = 7",
    ]  # fmt: skip
    hole = holed("def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n")
    assert hole == "def f():\n    # YOUR CODE HERE\n    raise NotImplementedError\n"
