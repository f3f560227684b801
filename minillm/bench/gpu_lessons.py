"""Run one lesson from top to bottom: `python -m minillm.bench.gpu_lessons LESSON.ipynb FOLDER`.

In a kernel of its own where nbclient and ipykernel are installed; the executed copy goes to FOLDER.
Elsewhere as a plain script: its cells one after another in one file in FOLDER, with a stand-in for
IPython's display that prints what has a text.
"""

import importlib.util
import json
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def run_lesson(lesson: Path, folder: Path) -> str:
    """Run a lesson, in whichever way is possible here; raises what its first failing cell raises.

    Returns how it ran: "in a kernel" or "as a script".
    """
    if all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))):
        _in_a_kernel(lesson, folder)
        return "in a kernel"
    _as_a_script(lesson, folder)
    return "as a script"


def _in_a_kernel(lesson: Path, folder: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(lesson, as_version=4)
    where = {"metadata": {"path": str(lesson.parent)}}
    client = NotebookClient(notebook, timeout=None, kernel_name="python3", resources=where)
    try:
        client.execute()
    finally:  # also the copy of one that failed
        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, folder / lesson.name)


class Shown:
    """Stands in for IPython.display's Markdown, HTML and Image."""

    def __init__(self, data: Any = None, **_: Any):
        self.data = data


def display(*things: Any) -> None:
    """Stands in for IPython.display.display: prints texts."""
    for thing in things:
        data = getattr(thing, "data", thing)
        print(data if isinstance(data, str) else f"({type(thing).__name__})")


def _stand_in_for_ipython() -> None:
    package, inside = ModuleType("IPython"), ModuleType("IPython.display")
    # Matplotlib asks for these: no kernel, of a version that needs no help.
    package.get_ipython, package.version_info = lambda: None, (9, 0)
    package.display, inside.display = inside, display
    for name in ("Markdown", "HTML", "Image"):
        setattr(inside, name, Shown)
    sys.modules |= {"IPython": package, "IPython.display": inside}


def script(lesson: Path) -> str:
    """The code cells of a lesson as one program, each with its place."""
    cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
    code = [(i, "".join(c["source"])) for i, c in enumerate(cells) if c["cell_type"] == "code"]
    return "".join(f"# {lesson.stem}, cell {i}\n{source}\n\n\n" for i, source in code)


def _as_a_script(lesson: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"{lesson.stem}.py"  # a file, where tracebacks and Triton find the lines
    program.write_text(script(lesson), encoding="utf-8")
    _stand_in_for_ipython()
    runpy.run_path(str(program), run_name="__main__")


def main(arguments: list[str]) -> int:
    """Run the lesson that the arguments name; returns the exit code, 1 if a cell failed."""
    lesson, folder = map(Path, arguments)
    try:
        print(f"{lesson.stem}: ran {run_lesson(lesson, folder)}")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
