"""A class: the course that make sets up, handed in and graded with nbgrader, and the handout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.api import Gradebook

ROOT = Path(__file__).parent.parent
LESSON = "10_sparsity"
IMPORTS = """
import torch
from minillm import costs
from minillm.mine.kept import keep
from minillm.quantization.sparsity import compress, mask_2_4
from minillm.tools.exercises import own_work
"""
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    # nbgrader calls programs that lie beside it
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": path},
    )  # fmt: skip


def only_the_exercises(folder: Path) -> Path:
    """The lesson with its first two exercises alone, so that it is graded in seconds."""
    lesson = nbformat.read(ROOT / "notebooks" / f"{LESSON}.ipynb", 4)
    graded = [c for c in lesson.cells if "nbgrader" in c.metadata][:4]
    lesson.cells = [nbformat.v4.new_code_cell(IMPORTS), *graded]
    nbformat.write(lesson, folder / f"{LESSON}.ipynb")
    return folder / f"{LESSON}.ipynb"


def make(target: str, lesson: Path, course: Path, *more: str) -> subprocess.CompletedProcess:
    # -o: this environment is good as it is
    names = f"LESSONS={lesson}", f"COURSE={course}"
    return run(ROOT, "make", "-o", ".venv/ready", target, *names, *more)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_course_from_release_to_feedback_and_handout(tmp_path):
    course, solved = tmp_path / "my course", only_the_exercises(tmp_path)
    made = make("course", solved, course)
    assert made.returncode == 0, made.stdout + made.stderr
    released = course / "release" / LESSON / f"{LESSON}.ipynb"
    text = released.read_text(encoding="utf-8")
    assert "### BEGIN SOLUTION" not in text and "Replace these lines" in text
    wrong = nbformat.read(solved, 4)
    (hole, *_) = (c for c in wrong.cells if c.metadata.get("nbgrader", {}).get("solution"))
    hole.source = re.sub("return .*", "return 0", hole.source)
    for learner, work in (("untouched", released), ("solved", solved), ("wrong", wrong)):
        handed_in = course / "submitted" / learner / LESSON / f"{LESSON}.ipynb"
        handed_in.parent.mkdir(parents=True)
        if isinstance(work, Path):
            shutil.copy(work, handed_in)
        else:
            nbformat.write(work, handed_in)
    for command in ("autograde", "generate_feedback"):
        done = run(course, sys.executable, "-m", "nbgrader", command, LESSON)
        assert done.returncode == 0, done.stdout + done.stderr
    assert run(course, sys.executable, "-m", "nbgrader", "export").returncode == 0
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        scores = {s.student.id: (s.score, s.max_score) for s in book.assignment_submissions(LESSON)}
    assert scores["untouched"][0] == 0
    assert scores["solved"][0] == scores["solved"][1] > scores["wrong"][0] > 0
    assert list((course / "feedback" / "wrong").rglob("*.html"))
    assert "solved" in (course / "grades.csv").read_text()
    for path in (course / "source" / LESSON / released.name, released):
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with (course / "nbgrader_config.py").open("a") as f:
        f.write("# ours\n")
    before = contents(course)
    again = make("course", solved, course)
    assert again.returncode == 0 and "the course keeps its own version" in again.stdout
    assert contents(course) == before  # nothing of what people put there is touched
    handout(solved, course, tmp_path / "hand out")


def handout(lesson: Path, course: Path, folder: Path) -> None:
    """What learners get has the lesson without solutions, and a package that works."""
    done = make("handout", lesson, course, f"HANDOUT={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    (given,) = (folder / "notebooks").glob("*.ipynb")
    assert "BEGIN SOLUTION" not in given.read_text(encoding="utf-8")
    assert not (folder / "tests").exists() and (folder / "Makefile").exists()
    assert list((folder / "figures" / "data").glob("*.json"))
    done = run(folder, sys.executable, "-c", "import minillm.model; print(minillm.__file__)")
    assert done.stdout.strip() == str(folder / "minillm" / "__init__.py")
    again = make("handout", lesson, course, f"HANDOUT={folder}")
    assert again.returncode != 0 and "is there already; move it away" in again.stdout


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_page_for_teachers_knows_the_points(path):
    cells = nbformat.read(path, 4).cells
    points = sum(c.metadata.get("nbgrader", {}).get("points", 0) for c in cells)
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if f"({path.name})" in line)
    assert line.split("|")[3].strip() == str(points)
