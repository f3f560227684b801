"""What would stop nbgrader, found before it starts: who, which lesson, which cell."""

import copy
import json
from pathlib import Path

import pytest

from minillm.tools.submissions import main

LESSON = "04_mqa_gqa"
RELEASED = Path(__file__).parent.parent / "notebooks" / f"{LESSON}.ipynb"


def hand_in(course: Path, learner: str, text: str, name: str = LESSON) -> None:
    folder = course / "submitted" / learner / LESSON
    folder.mkdir(parents=True)
    (folder / f"{name}.ipynb").write_text(text, encoding="utf-8")


@pytest.fixture
def course(tmp_path) -> Path:
    hand_in(tmp_path, "zoe", RELEASED.read_text(encoding="utf-8"))
    return tmp_path


def with_a_copy() -> tuple[str, str]:
    """The lesson with one exercise's cell twice, and that cell's id."""
    notebook = json.loads(RELEASED.read_text(encoding="utf-8"))
    place, cell = next(
        (i, c) for i, c in enumerate(notebook["cells"]) if "nbgrader" in c["metadata"]
    )
    notebook["cells"].insert(place + 1, copy.deepcopy(cell))
    return json.dumps(notebook), cell["metadata"]["nbgrader"]["grade_id"]


def test_nothing_is_wrong(course, capsys):
    assert main([str(course)]) == 0
    assert capsys.readouterr().out == "Every notebook can be graded.\n"


def test_a_copied_cell_names_its_learner(course, capsys):
    text, grade_id = with_a_copy()
    hand_in(course, "ada", text)
    assert main([str(course)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"ada, {LESSON}: 2 cells have the grade_id '{grade_id}'; delete the cop")


def test_cells_that_are_gone_or_new_are_no_trouble(course, capsys):
    notebook = json.loads(RELEASED.read_text(encoding="utf-8"))
    notebook["cells"] = [c for c in notebook["cells"] if "nbgrader" not in c["metadata"]]
    notebook["cells"] += [{"cell_type": "code", "metadata": {}, "source": "1"}] * 3
    hand_in(course, "kim", json.dumps(notebook))
    assert main([str(course)]) == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{}]}', "[" * 100_000, '{"cells": ["x"]}']
)
def test_what_is_no_notebook(course, text, capsys):
    hand_in(course, "bob", text)
    assert main([str(course)]) == 1
    assert f"bob, {LESSON}: {LESSON}.ipynb is not a notebook" in capsys.readouterr().out


def test_a_name_that_nbgrader_does_not_know(course, capsys):
    hand_in(course, "eve", RELEASED.read_text(encoding="utf-8"), name="lesson (1)")
    assert main([str(course)]) == 1
    assert f"lesson (1).ipynb is not graded; name it {LESSON}.ipynb" in capsys.readouterr().out


def test_a_folder_without_submissions(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("minillm: ") and "holds no notebooks" in err and err.count("\n") == 1
