"""A look at what learners handed in, before nbgrader grades it.

    python -m minillm.tools.submissions build/course

nbgrader stops at the first notebook in which two cells have one grade_id, as a copied exercise cell
has, and grades nobody after it. Here every such notebook gets one sentence that names the learner
and the cell. A graded cell that was deleted is no trouble: nbgrader puts it back.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from minillm.tools.command_line import Parser, run


def troubles(course: Path) -> Iterator[str]:
    """A sentence for each notebook of submitted/LEARNER/LESSON/ that nbgrader would stop at.

    ValueError for a folder without submissions.
    """
    submitted = course / "submitted"
    notebooks = sorted(submitted.glob("*/*/*.ipynb"))
    if not notebooks:
        raise ValueError(
            f"{submitted} holds no notebooks; put them into submitted/LEARNER/LESSON/LESSON.ipynb."
        )
    for path in notebooks:
        learner, lesson = path.parts[-3:-1]
        for what in _troubles_of(path):
            yield f"{learner}, {lesson}: {what}"


def _troubles_of(path: Path) -> Iterator[str]:
    if path.stem != path.parent.name:
        yield f"{path.name} is not graded; name it {path.parent.name}.ipynb, as it was released."
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        ids = Counter(cell["metadata"].get("nbgrader", {}).get("grade_id") for cell in cells)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield f"{path.name} is not a notebook; ask for it again."
        return
    for grade_id, n in ids.items():
        if grade_id is not None and n > 1:
            yield (
                f"{n} cells have the grade_id {grade_id!r}; delete the copies, or remove "
                '"nbgrader" from their metadata.'
            )


def main(arguments: list[str] | None = None) -> int:
    """Print what would stop nbgrader; returns 1 if there is anything."""
    parser = Parser(prog="python -m minillm.tools.submissions", description=__doc__)
    parser.add_argument("course", type=Path, nargs="?", default=Path(), help="default: here")
    options = parser.parse_args(arguments)

    def report() -> int:
        found = list(troubles(options.course))
        print("\n".join(found) or "Every notebook can be graded.")
        return int(bool(found))

    return run(report)


if __name__ == "__main__":
    sys.exit(main())
