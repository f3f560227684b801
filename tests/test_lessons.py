"""The notebooks as documents.

Executed in order, exercises that nbgrader understands, cells that can be read.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from statements import STATEMENTS

from minillm.bench.recording import record_of
from minillm.mine.parts import PARTS

FOLDER = Path(__file__).parent.parent / "notebooks"
LESSONS = sorted(FOLDER.glob("*.ipynb"))
FURTHER = sorted(FOLDER.glob("further/*.ipynb"))


def all_cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def cells_of(path: Path) -> list[dict]:
    """Those of the lesson itself: without the cell that installs the package."""
    return [c for c in all_cells(path) if "set-up" not in c["metadata"].get("tags", ())]


@pytest.fixture(params=LESSONS + FURTHER, ids=lambda p: p.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def cells(path) -> list[dict]:
    return cells_of(path)


@pytest.fixture(params=LESSONS, ids=lambda p: p.stem)
def lesson(request) -> list[dict]:
    return cells_of(request.param)


def source(cell: dict) -> str:
    return "".join(cell["source"])


def code(cells: list[dict]) -> list[dict]:
    return [c for c in cells if c["cell_type"] == "code"]


def text_of(cells: list[dict]) -> str:
    return "\n\n".join(source(c) for c in cells if c["cell_type"] == "markdown")


def test_there_are_lessons():
    assert [p.stem[:2] for p in LESSONS] == [f"{i:02}" for i in range(len(LESSONS))]
    assert len(LESSONS) >= 4
    for path in FURTHER:  # each belongs to a lesson, which names it
        (own,) = (lesson for lesson in LESSONS if lesson.stem[:2] == path.stem[:2])
        assert f"(further/{path.name})" in text_of(cells_of(own))


def test_committed_as_executed(path):
    cells = all_cells(path)
    counts = [c["execution_count"] for c in code(cells)]
    assert counts == list(range(1, len(counts) + 1))
    for output in (o for c in code(cells) for o in c["outputs"]):
        assert output["output_type"] != "error"
        text = json.dumps(output)
        assert output.get("name") != "stderr"
        for word in ("Warning", "Traceback", "/root/", "/home/", "/tmp/", "widget"):
            assert word not in text


SET_UP = source(all_cells(LESSONS[0])[1])


def test_each_begins_with_the_same_set_up(path):
    (cell,) = (c for c in all_cells(path) if "set-up" in c["metadata"].get("tags", ()))
    assert cell is not None and source(cell) == SET_UP == source(all_cells(path)[1])
    assert cell["metadata"]["jupyter"]["source_hidden"] and not cell["outputs"]


@pytest.mark.parametrize("place", ["notebooks/further", "elsewhere", "installed"])
def test_the_set_up_installs_what_is_missing(place, tmp_path, monkeypatch):
    """In a copy of the project, where a lesson lies alone, and where the package is there."""
    root = tmp_path / "project"
    (root / "notebooks" / "further").mkdir(parents=True)
    (root / "constraints.txt").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(root / place if place == "notebooks/further" else tmp_path / "elsewhere")
    if place != "installed":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr("builtins.input", lambda asked: "https://example.org/minillm")
    asked, path = [], list(sys.path)
    monkeypatch.setattr("sys.path", path)
    monkeypatch.setattr("subprocess.run", lambda words, **_: asked.append([str(w) for w in words]))
    exec(SET_UP, {})
    if place == "installed":
        assert not asked
        return
    if place == "elsewhere":
        root = tmp_path / "elsewhere" / "minillm-project"
        assert asked.pop(0)[-2:] == ["https://example.org/minillm", str(root)]
    install, fetch = asked
    assert install[-4:] == ["-c", f"{root}/constraints.txt", "-e", f"{root}[lessons,serve]"]
    assert fetch[1:] == ["-m", "minillm", "fetch"] and path[0] == str(root)


def test_cells_can_be_read(path, cells):
    assert max(len(source(c).splitlines()) for c in code(cells)) <= 24
    assert len(cells) <= 66
    typed = sum(len(source(c).split()) for c in code(cells))
    # More is told than typed; a further notebook may look at code that was told before.
    assert len(text_of(cells).split()) > typed * (0.6 if path in FURTHER else 0.8)


def main_path(lesson):
    """Its text up to the exercises at the end, or to what goes further; none of its exercises."""
    texts = []
    ends = re.compile(r"^## (?:\d+\. Exercises$|Exercise|Going further)", re.MULTILINE)
    for cell in (c for c in lesson if c["cell_type"] == "markdown"):
        here, *rest = ends.split(source(cell), maxsplit=1)
        texts.append(re.split(r"^### Exercise", here, flags=re.MULTILINE)[0])
        if rest:
            return "\n\n".join(texts)
    raise AssertionError("The lesson has no exercises and goes no further.")


def test_a_lesson_takes_an_evening(lesson):
    without_formulas = re.sub(r"\$\$.*?\$\$", "", main_path(lesson), flags=re.DOTALL)
    assert len(without_formulas.split()) <= 2600
    assert len(text_of(lesson).split()) <= 4000
    folded = [c for c in lesson if "hide-input" in c["metadata"].get("tags", ())]
    assert sum(len(source(c).splitlines()) for c in folded) <= 250


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_outputs_do_not_deny_the_text(path):
    """Most of the numbers are measured, so another run may deny a sentence: then it is put right.

    The sentences speak of the machine whose benchmarks the lessons show.
    """
    text, machine = text_of(cells_of(path)), record_of("speculate")["hardware"]["name"]
    results = [output for c in code(cells_of(path)) for output in c["outputs"]]
    shown = [o.get("text") or o.get("data", {}).get("text/markdown", ()) for o in results]
    outputs = "\n".join("".join(lines) for lines in shown)
    if " threads)" in outputs and f"{machine} (" not in outputs:
        pytest.skip(f"{path.stem} was executed on another machine than {machine}.")
    statements = [s for s in STATEMENTS if path.stem.startswith(s.lesson)]
    assert statements
    for statement in statements:
        assert statement.words in text, f"The lesson does not say: {statement.words}"
        numbers = []
        for pattern in statement.found:
            match = re.search(pattern, outputs)
            assert match, f"{statement.words!r}: no output has {pattern}"
            numbers += [float(number.replace(",", "")) for number in match.groups()]
        assert statement.holds(*numbers), f"{statement.words!r}: {numbers}"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.file)
def test_what_is_built_is_kept(part):
    (path,) = (p for p in LESSONS if p.stem.startswith(part.lesson))
    for cell in cells_of(path):
        if f"keep({', '.join(part.names)})" in source(cell):
            assert cell["metadata"]["nbgrader"]["grade"]
            assert f"Kept in mine/{part.file}.py." in json.dumps(cell["outputs"])
            return
    raise AssertionError(f"{path.name} does not keep {part.names}")


def test_exercises_are_nbgraders(lesson):
    solutions = [c for c in lesson if c["metadata"].get("nbgrader", {}).get("solution")]
    tests = [c for c in lesson if c["metadata"].get("nbgrader", {}).get("grade")]
    assert len(solutions) == len(tests) >= 1
    for cell in solutions:
        assert "### BEGIN SOLUTION" in source(cell) and "### END SOLUTION" in source(cell)
    for cell in tests:
        assert "assert" in source(cell) and cell["metadata"]["nbgrader"]["points"] > 0
    ids = [c["metadata"]["nbgrader"]["grade_id"] for c in solutions + tests]
    assert len(set(ids)) == len(ids)


def test_exercises_are_numbered(lesson):
    """From 1, without a gap, each with its minutes; and those that the text speaks of are there."""
    text = text_of(lesson)
    headings = re.findall(r"^#+ .*Exercise (\d)(?: ★)?: .*\(\d+ minutes\)$", text, re.MULTILINE)
    assert headings == [str(1 + i) for i in range(len(headings))] != []
    named = re.findall(r"[Ee]xercises? (\d)(?: (?:and|to) (\d))?", text)
    assert {n for pair in named for n in pair if n} <= set(headings)


def test_headings_follow_the_rhythm(lesson):
    text = text_of(lesson)
    assert text.startswith("# ")
    for heading in ("Exercise", "## Takeaways"):
        assert heading in text


def test_pictures_are_described_and_there(path, cells):
    for cell in code(cells):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                assert output["metadata"]["image/png"]["alt"]
        if "plots.save(" in source(cell) and len(source(cell).splitlines()) > 12:
            assert "hide-input" in cell["metadata"].get("tags", ())
        if "hide-input" in cell["metadata"].get("tags", ()):  # JupyterLab folds by another mark
            assert cell["metadata"]["jupyter"]["source_hidden"]
    text = "\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    for alt, link in re.findall(r"(?<=!\[)([^]]*)\]\(([^)]+)\)", text):
        assert alt and (path.parent / link).stat().st_size <= 300_000
    for link in re.findall(r"\]\(([^):]+\.(?:ipynb|md|py))\)", text):
        assert (path.parent / link).exists(), link


def test_something_is_compared_with_its_recorded_output(cells):
    """At least one cell that nbval must find unchanged, and never one with a clock in it."""
    checked = [source(c) for c in code(cells) if source(c).startswith("# NBVAL_CHECK_OUTPUT")]
    assert checked
    assert not any("perf_counter" in s or "seconds_per_call" in s for s in checked)


def test_all_lessons_ran_on_one_machine():
    """Numbers of two machines must not stand in one course under one name."""
    named = re.compile(r"family \d+ model \d+ \(\d+ threads\)")
    measures = re.compile(r"from minillm\.measure import (?!QUICK\\n)")  # more than that name
    seen: dict[str, list[str]] = {}
    for path in LESSONS + FURTHER:
        outputs = json.dumps([c["outputs"] for c in code(cells_of(path))], ensure_ascii=False)
        for name in set(named.findall(outputs)):
            seen.setdefault(name, []).append(path.stem)
        if measures.search(path.read_text(encoding="utf-8")):
            assert named.search(outputs), f"{path.stem} measures and does not say on what"
    assert len(seen) == 1, seen
