"""What all command lines of the package have in common.

Bad input ends with one sentence on standard error and exit code 2, never with a traceback.
"""

import argparse
import io
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Reports a mistake in the arguments in one line; options have no abbreviations."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print(f"minillm: {message}; see `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)


def first_line(error: BaseException) -> str:
    """The error's first line: our own messages are one sentence, PyTorch's can be many lines."""
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0]


def run(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code, or the exit code of the error it ended with."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal's encoding lacks must not end the program.
            stream.reconfigure(errors="replace")
    before = _terminate_by_exception()
    try:
        return command() or 0
    except BrokenPipeError:  # the reader of our output went away, as with `| head`
        sys.stderr.close()
        return 141  # 128 + SIGPIPE, as a shell reports it
    except MemoryError:
        print("minillm: there is not enough memory; use a smaller model or dtype.", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"minillm: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _terminate_by_exception() -> object:
    """Let SIGTERM end this process as an error would, so that temporary folders are removed."""

    def terminate(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    try:
        return signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread
        return None
