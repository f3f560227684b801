"""The reader's own folder: one file for each part that was built in a lesson.

`keep` writes a part, loads it from its file, and checks it once more against the package, so that
what lies in the folder works outside of its notebook. Lesson 14 makes an engine of these parts.
The folder is `mine/` beside the notebooks, or the one that $MINILLM_MINE names.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from minillm.mine.checks import let_kernels_run
from minillm.mine.parts import PARTS
from minillm.mine.source import standalone


def folder() -> Path:
    """`mine/` beside the notebooks, or what $MINILLM_MINE names. It need not exist."""
    if named := os.environ.get("MINILLM_MINE"):
        return Path(named)
    here = Path.cwd()
    return (here / "notebooks" if (here / "notebooks").is_dir() else here) / "mine"


def keep(*definitions: Any) -> None:
    """Write a part's functions to the reader's folder, once they pass the part's check there.

    Says in one line what became of it and never raises: a lesson goes on without the file. An
    earlier version is set aside beside it, and this is said.
    """
    names = tuple(getattr(each, "__name__", repr(each)) for each in definitions)
    part = next((part for part in PARTS if part.names == names), None)
    if part is None:
        known = "; ".join(", ".join(part.names) for part in PARTS)
        print(f"Not kept: {', '.join(names)} is no part. The parts are {known}.")
        return
    path = folder() / f"{part.file}.py"
    trial = path.with_name(f"_{part.file}.py")
    try:
        text = f'"""Lesson {part.lesson}: {part.use}."""\n\n{standalone(definitions)}'
        path.parent.mkdir(parents=True, exist_ok=True)
        trial.write_text(text, encoding="utf-8")
        part.check(_loaded(trial))
        kept = _put(trial, path)
    except Exception as error:  # of any kind: the reader's code runs here
        if trial.is_file():
            trial.unlink()
        print(f"Not kept: {_reason(error)}")
        return
    print(f"Kept in mine/{path.name}.{kept}")


def _put(trial: Path, path: Path) -> str:
    """Give the new file its name. An older one with another text moves aside, never away."""
    said = ""
    if path.exists() and path.read_bytes() != trial.read_bytes():
        aside = path.with_name(f"{path.stem}_before.py")
        os.replace(path, aside)
        said = f" Your version before is in mine/{aside.name}."
    os.replace(trial, path)
    return said


def load(file: str) -> ModuleType | None:
    """The reader's part of that name as a module; None if it is not in the folder.

    Runs the file, so it raises what the reader's code raises.
    """
    path = folder() / f"{file}.py"
    return _loaded(path) if path.exists() else None


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mine.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and Triton look their module up
    spec.loader.exec_module(module)
    return module


def _reason(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, (AssertionError, ValueError)) and first else repr(error)


def report() -> int:
    """Print which parts are there and whether each still passes; 1 if one does not, else 0."""
    wrong = 0
    let_kernels_run()
    print(f"The parts in {folder()}:")
    for part in PARTS:
        try:
            module = load(part.file)
            state = "not there yet" if module is None else (part.check(module) or "right")
        except Exception as error:
            state, wrong = f"wrong: {_reason(error)}", 1
        print(f"{part.lesson}  {part.file:<18} {state}")
    return wrong
