"""Reading untrusted files: regular ones only, of a size that a genuine file can have.

A name may be a link to an endless device, a file may hold lists nested a million times. Sizes are
checked before anything is read, so that a forged file gives an error and does not fill the memory.
"""

import json
from pathlib import Path
from typing import Any

from minillm.tools.checks import brief

MEGABYTE = 1_000_000
PATH = 300
"""Characters of a path that a message shows: those of a hub's cache have more than 100."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_CONTAINERS = 2_000_000
"""Lists and objects in one JSON file; a large vocabulary has a list for each of its merges."""


def check_file(path: Path, limit: float = float("inf")) -> None:
    """Raise ValueError unless `path` is a regular file of at most `limit` bytes.

    Also for the few lines that git leaves in the place of a large file that was not fetched.
    """
    if not path.is_file():
        raise ValueError(f"{brief(str(path), PATH)} is not a regular file; give the file itself.")
    if path.stat().st_size > limit:
        raise ValueError(
            f"{brief(str(path), PATH)} has {path.stat().st_size} bytes; files of this kind have at "
            f"most {limit:.0f}."
        )
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        raise ValueError(f"{brief(str(path), PATH)} cannot be read ({error}).") from error
    if is_pointer:
        raise ValueError(
            f"{brief(str(path), PATH)} is a git-lfs pointer and not the file itself; run "
            "git lfs pull in its folder."
        )


def read_text(path: Path, limit: int) -> str:
    """The text of a UTF-8 file of at most `limit` bytes."""
    check_file(path, limit)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{brief(str(path), PATH)} cannot be read as text ({error}).") from error


def read_json(path: Path, *, limit: int = MEGABYTE, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes.

    Raises ValueError or FileNotFoundError in one sentence, also for an object with duplicate keys.
    """
    if not path.exists():
        if missing_ok:
            return {}
        raise FileNotFoundError(
            f"{brief(str(path), PATH)} does not exist; a Hugging Face folder has it."
        )
    text = read_text(path, limit)
    # An upper bound, as brackets in strings count too, but before any memory is spent on parsing
    if text.count("[") + text.count("{") > _MAX_CONTAINERS:
        raise ValueError(
            f"{brief(str(path), PATH)} has more than {_MAX_CONTAINERS} lists and objects; no "
            "checkpoint has such a file."
        )
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{brief(str(path), PATH)} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{brief(str(path), PATH)} holds a {type(value).__name__}; expected a JSON object."
        )
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One JSON object; json itself would silently keep the last of two equal keys."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {brief(twice)} appears twice")
    return value
