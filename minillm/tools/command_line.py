"""What every command line of the package does alike.

Bad input ends with one sentence on standard error and exit code 2, never with a traceback.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command."""

    def error(self, message: str) -> NoReturn:
        print(f"minillm: {message}; see `{self.prog} --help`.", file=sys.stderr)
        sys.exit(2)


def first_line(error: BaseException) -> str:
    """What our own errors say is one sentence; PyTorch's can be many lines."""
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0]


def run(command: Callable[[], int | None]) -> int:
    """Run a command; returns its exit code, or that of the error it ended with."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # an encoding that lacks a character must not end us
            stream.reconfigure(errors="replace")
    before = _terminate_by_exception()
    try:
        return command() or 0
    except BrokenPipeError:  # the reader of our output went away, as with `| head`
        sys.stderr.close()
        return 141
    except MemoryError:
        print("minillm: there is not enough memory; use a smaller model or dtype.", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"minillm: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
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
