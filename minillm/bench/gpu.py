"""The first ten minutes on a GPU: `make gpu`, or `python -m minillm.bench gpu`.

Nine parts, each in a process with its own time limit, so that a part that hangs or breaks the
device costs only its own minutes. Each records row by row, and when it ends, in whatever way, its
rows are collected into `figures/data/gpu-first.HARDWARE.json`. No network, no checkpoint and no
package beyond torch and triton is needed: whatever is missing is a gap in the results. The tests
come last: several processes share the GPU then, so nothing else can be timed.
`--second` runs slower parts: FlexAttention, transformers, the lessons. `--part NAME` runs one part
in this process; `--tiny` uses sizes small enough to run the same code in Triton's interpreter.
"""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from minillm.bench.recording import Recording, hardware_label
from minillm.measure import matmul_peak, memory_speeds
from minillm.tools.folders import cache_folder, project_folder

MINUTES = 9.3
# The seconds that each part may take.
FIRST = {
    "ceilings": 60, "model": 150, "engine": 120, "forward": 180, "decode-attention": 120,
    "matrices": 120, "backward": 150, "specialized": 60, "tests": 300,
}  # fmt: skip
SECOND = {"flex": 180, "transformers": 240, "lessons": 300}
PARTS = {
    "ceilings": "minillm.bench.gpu:ceilings",
    "model": "minillm.bench.gpu_model:model",
    "engine": "minillm.bench.gpu_model:engine",
    "forward": "minillm.bench.gpu_kernels:forward",
    "decode-attention": "minillm.bench.gpu_kernels:decode_attention",
    "matrices": "minillm.bench.gpu_kernels:matrices",
    "backward": "minillm.bench.gpu_kernels:backward",
    "specialized": "minillm.bench.gpu_kernels:specialized",
    "tests": "minillm.bench.gpu:tests",
    "flex": "minillm.bench.gpu_second:flex",
    "transformers": "minillm.bench.gpu_second:transformers",
    "lessons": "minillm.bench.gpu_second:lessons",
}

Part = Callable[[Recording, bool], None]


def bench(
    device: torch.device, folder: Path, *, second: bool = False, tiny: bool = False
) -> list[Path]:
    """Run the parts one after another while there is time; returns the file written."""
    ends = time.monotonic() + 60 * MINUTES
    path = folder / f"gpu-{'second' if second else 'first'}.{hardware_label(device)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    collected: dict[str, Any] = {"parts": {}}
    with tempfile.TemporaryDirectory() as parts:
        for name, limit in (SECOND if second else FIRST).items():
            start = time.monotonic()
            if ends - start < 20:
                ended = f"not begun, the {MINUTES} minutes are over"
            else:
                command = [sys.executable, "-m", "minillm.bench", "gpu", "--part", name]
                command += ["--device", str(device), "--out", parts]
                command += ["--tiny"] if tiny else []
                code = run_for(command, min(limit, ends - start))  # None: stopped
                ended = "done" if code == 0 else f"failed with exit code {code}"
                if code is None:
                    ended = "stopped at its limit; what it had measured is recorded"
            ended += f", {time.monotonic() - start:.0f} s"
            print(f"{name}: {ended}", flush=True)
            collected["parts"][name] = {"ended": ended}
            for file in Path(parts).glob(f"gpu-{name}.*.json"):
                with suppress(json.JSONDecodeError):  # stopped while writing
                    collected["parts"][name] |= json.loads(file.read_text())
            path.write_text(json.dumps(collected, indent=1) + "\n")
    return [path]


def run_for(
    command: list[str],
    limit: float,
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    log: IO[str] | None = None,
) -> int | None:
    """The exit code of a command; None if it timed out and was killed with all its children.

    log: a file for all that it prints.
    """
    with subprocess.Popen(
        command, start_new_session=True, cwd=cwd, env=env, stdout=log, stderr=log
    ) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also when this process is interrupted
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_part(name: str, device: torch.device, folder: Path, tiny: bool) -> Path:
    """Run one part in this process; returns its file. ValueError for an unknown name."""
    if name not in PARTS:
        raise ValueError(f"There is no part {name!r}; choose from {', '.join(PARTS)}.")
    recording = Recording(f"gpu-{name}", device, {"tiny": tiny}, folder)
    module, _, function = PARTS[name].partition(":")
    part: Part = getattr(importlib.import_module(module), function)
    torch.manual_seed(0)
    with torch.no_grad():
        part(recording, tiny)
    return recording.path


def report(recording: Recording, what: str, value: float, unit: str, **more: Any) -> None:
    """Print a result and record it.

    More than 100% of a bound is recorded as "over_bound": these parts test the bounds as well.
    """
    share = f", {more['of_bound']:.1%} of the bound" if "of_bound" in more else ""
    if more.get("of_bound", 0) > 1:
        more["over_bound"] = more.pop("of_bound")
    print(f"  {what}: {value:,.4g} {unit}{share}", flush=True)
    recording.add({"what": what, "value": value, "unit": unit} | more, {})


def ceilings(recording: Recording, tiny: bool) -> None:
    """What the chip can do: its processors, its memory, and the bounds for all other parts."""
    device = recording.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        report(recording, "multiprocessors", properties.multi_processor_count, "")
        report(recording, "memory", properties.total_memory / 1e9, "GB")
        report(recording, "L2 cache", properties.L2_cache_size / 1e6, "MB")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(64, 64, device=device, dtype=dtype) if tiny else None
    for name, speed in memory_speeds(device, dtype, matrix).items():
        report(recording, name, speed / 1e9, "GB/s")
    if not tiny:
        report(recording, "product of 8192³", matmul_peak(device, dtype) / 1e12, "TFLOP/s")


# The files with tests marked `gpu`; others import packages that a machine with a GPU may lack.
_TESTS = ("test_gpu.py", "test_paged_attention.py", "test_engine.py")
_NEED_CHECKPOINT = "default_checkpoint or auto_is_bfloat16"


def tests(recording: Recording, tiny: bool) -> None:
    """The tests marked `gpu`, many at a time: most of the time is compilation.

    The specialized kernels run separately, since no such kernel has run on a GPU before.
    """
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("xdist") is None:
        recording.gap("tests", "pytest or pytest-xdist is not installed")
        return
    skipped = "specialized"
    if not any(cache_folder().glob("*.gguf")):
        recording.gap("tests of the default checkpoint", f"there is none in {cache_folder()}")
        skipped += f" or {_NEED_CHECKPOINT}"
    _run_tests(recording, "tests", f"not ({skipped})", FIRST["tests"] - 70, tiny)
    _run_tests(recording, "tests of specialized kernels", "specialized", 50, tiny)


def _run_tests(recording: Recording, label: str, chosen: str, limit: float, tiny: bool) -> None:
    """Report how the tests that pytest's `-k chosen` selects ended within `limit` seconds."""
    names = [str(project_folder() / "tests" / name) for name in _TESTS[: 1 if tiny else None]]
    workers = "1" if tiny else str(max(2, (os.cpu_count() or 4) - 2))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", chosen, "-vv", "-n", workers]
    command += ["-p", "no:cacheprovider", *names]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as log:
        # What Triton tunes while other processes use the GPU must not be kept.
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        code = run_for(command, limit, cwd=project_folder(), env=environment, log=log)
        log.seek(0)
        lines = log.read()
    # Read off the log, since a run that was stopped has no summary.
    ended = re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) (\S+::.*)", lines)
    counts = {
        kind.lower(): len({test for k, test in ended if k == kind})
        for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    bad = sorted({test for kind, test in ended if kind in ("FAILED", "ERROR")})
    print(lines[-3000:] if bad or not ended else "", flush=True)
    stopped = code is None
    report(recording, label, counts["passed"], "passed", **counts, bad=bad, stopped=stopped)
