"""Checks that several modules need, so that one mistake always gets the same sentence."""

import argparse
import sys
from typing import NoReturn


def brief(value: object, limit: int = 100) -> str:
    """`repr(value)` for an error message: escaped, and cut after `limit` characters.

    Values from files can be of any length and hold any characters.
    """
    text = repr(value[: limit + 1] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= limit + 2 else f"{text[:limit]}…"


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless `value` is an int (not a bool, not 2.0) of `least` or more."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {brief(value)}; it must be a whole number, {least} or more.")


def first_line(error: BaseException) -> str:
    """What our own errors say is one sentence; PyTorch's can be many lines."""
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0]


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command."""

    def error(self, message: str) -> NoReturn:
        print(f"minillm: {message}; see `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)
