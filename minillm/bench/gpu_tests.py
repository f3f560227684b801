"""Parts of `minillm.bench.gpu` that run the tests marked `gpu`, many at a time.

Several processes share the GPU then, so nothing else can be timed. Most of the time is compilation.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from threading import Thread
from typing import IO

from minillm.bench.gpu import report
from minillm.bench.recording import Recording
from minillm.tools.folders import cache_folder, project_folder

# The files with tests marked `gpu`; others import packages that a machine with a GPU may lack.
_FILES = ("test_gpu.py", "test_paged_attention.py", "test_engine.py")
_NEED_CHECKPOINT = "default_checkpoint or auto_is_bfloat16"
_TO_END = 15  # seconds kept for pytest's summary, and for killing what does not end


def tests(recording: Recording, tiny: bool) -> None:
    """All but the tests of the specialized kernels, since no such kernel has run on a GPU yet."""
    skipped = "specialized"
    if not any(cache_folder().glob("*.gguf")):
        recording.gap("tests of the default checkpoint", f"there is none in {cache_folder()}")
        skipped += f" or {_NEED_CHECKPOINT}"
    _run_tests(recording, "tests", f"not ({skipped})", tiny)


def specialized_tests(recording: Recording, tiny: bool) -> None:
    """The tests of the specialized kernels."""
    _run_tests(recording, "tests of specialized kernels", "specialized", tiny)


def _run_tests(recording: Recording, label: str, chosen: str, tiny: bool) -> None:
    """Report how the tests that pytest's `-k chosen` selects ended within the part's seconds."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("xdist") is None:
        recording.gap(label, "pytest or pytest-xdist is not installed")
        return
    names = [str(project_folder() / "tests" / name) for name in _FILES[: 1 if tiny else None]]
    workers = "1" if tiny else str(max(2, (os.cpu_count() or 4) - 2))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", chosen, "-vv", "-n", workers]
    command += ["-p", "no:cacheprovider", "--tb=short", "--durations=15", *names]
    # A file that imports what is missing costs no other file; a test that hangs shows where.
    command += ["--continue-on-collection-errors", "-o", "faulthandler_timeout=60"]
    seconds = recording.document["settings"].get("seconds")
    stopped, lines = printed(command, None if seconds is None else max(5, seconds - _TO_END))
    counts, bad = ended(lines)
    report(recording, label, counts["passed"], "passed", **counts, bad=bad, stopped=stopped)


def ended(lines: list[str]) -> tuple[dict[str, int], list[str]]:
    """How many tests ended in each way, and the names of those that went wrong.

    Read off pytest's lines as they come, since a run that was stopped has no summary. Where there
    is one, it names a test a second time, with a reason.
    """
    kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    found = re.findall(rf"({'|'.join(kinds)}) (\S+\.py(?:::.*)?)", "".join(lines))
    names = {(kind, test.partition(" - ")[0].strip()) for kind, test in found}
    counts = {kind.lower(): sum(k == kind for k, _ in names) for kind in kinds}
    return counts, sorted(test for kind, test in names if kind in ("FAILED", "ERROR"))


def printed(command: list[str], limit: float | None) -> tuple[bool, list[str]]:
    """Run a command in the project's folder; whether it was stopped, and the lines it printed.

    They are printed here as well, as they come. It stays in this process group, so that whoever
    kills that kills it. After `limit` seconds it is interrupted, and killed if that does not help.
    """
    lines: list[str] = []

    def read(stream: IO[str]) -> None:
        for line in stream:
            print(line, end="", flush=True)
            lines.append(line)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        # What Triton tunes while other processes use the GPU must not be kept.
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        process = subprocess.Popen(
            command, cwd=project_folder(), env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        reader = Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        stopped = _wait(process, limit)
        reader.join(2)  # a child that lives on may hold the other end
    return stopped, lines


def _wait(process: subprocess.Popen, limit: float | None) -> bool:
    """Whether a process had to be stopped after `limit` seconds. Waits little longer than that."""
    stopped = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        stopped = True
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TO_END / 2)
    finally:
        process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)
    return stopped
