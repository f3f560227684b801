"""The learners' version of a lesson, graded with nbgrader: untouched 0, solutions full marks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook

ROOT = Path(__file__).parent.parent
LESSON = "01_counting_parameters"  # a short one, with several exercises

pytestmark = pytest.mark.slow


def nbgrader(course: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "nbgrader", *arguments, "--course-dir=."]
    done = subprocess.run(command, cwd=course, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_untouched_is_0_and_solutions_are_full_marks(tmp_path, monkeypatch):
    # nbgrader calls programs that lie beside it.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    source = tmp_path / "source" / "minillm"
    source.mkdir(parents=True)
    lesson = shutil.copy(ROOT / "notebooks" / f"{LESSON}.ipynb", source)
    nbgrader(tmp_path, "generate_assignment", "minillm", "--create")
    released = tmp_path / "release" / "minillm" / f"{LESSON}.ipynb"
    holes = nbformat.read(released, 4)
    assert "### BEGIN SOLUTION" not in released.read_text(encoding="utf-8")
    assert any(cell.metadata.get("nbgrader", {}).get("solution") for cell in holes.cells)
    for learner, work in (("untouched", released), ("solved", lesson)):
        handed_in = tmp_path / "submitted" / learner / "minillm"
        handed_in.mkdir(parents=True)
        shutil.copy(work, handed_in / f"{LESSON}.ipynb")
    nbgrader(tmp_path, "autograde", "minillm")
    with Gradebook(f"sqlite:///{tmp_path}/gradebook.db") as book:
        scores = {
            s.student.id: (s.score, s.max_score) for s in book.assignment_submissions("minillm")
        }
    assert scores["untouched"][0] == 0
    assert scores["solved"][0] == scores["solved"][1] > 0


def test_make_student_deletes_nothing():
    recipe = (ROOT / "Makefile").read_text().split("\nstudent:")[1]
    assert "rm " not in recipe and "cp -n" in recipe
