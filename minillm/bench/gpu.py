"""The first minutes on a GPU: `make gpu`, or `python -m minillm.bench gpu`.

Each part is a process with its own time limit, so that a part that hangs or breaks the device costs
only its own minutes. Correctness comes first; the kernels that no GPU has run yet, and that may
hang, come last. All rows, and the traceback of a part that failed, are collected every few seconds
in `figures/data/gpu-first.HARDWARE.json`; what the parts print is in the file of that name that
ends with `.log`. No network, no checkpoint and no package beyond torch and triton is needed:
whatever is missing is a gap in the results.
`gpu PART PART` runs some parts only, in that order; `--second` runs slower ones: FlexAttention,
transformers, the lessons. `--part NAME` runs one part in this process; `--tiny` uses sizes small
enough to run the same code in Triton's interpreter.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minillm.bench.recording import Recording, hardware_label, write_json
from minillm.measure import matmul_peak, memory_speeds

MINUTES = 8.0
# The most seconds for each part. Estimates, about twice what a part needs: a kernel compiles in a
# second of one CPU, a configuration is timed for a tenth of a second, a process starts in ten.
FIRST = {
    "ceilings": 40, "tests": 190, "model": 80, "engine": 60, "matrices": 70, "backward": 70,
    "forward": 90, "decode-attention": 60, "few-bits": 60, "specialized-tests": 40,
    "specialized": 40,
}  # fmt: skip
SECOND = {"flex": 150, "transformers": 200, "lessons": 300}
PARTS = {
    "ceilings": "minillm.bench.gpu:ceilings",
    "tests": "minillm.bench.gpu_tests:tests",
    "model": "minillm.bench.gpu_model:model",
    "engine": "minillm.bench.gpu_model:engine",
    "matrices": "minillm.bench.gpu_decode:matrices",
    "backward": "minillm.bench.gpu_kernels:backward",
    "forward": "minillm.bench.gpu_kernels:forward",
    "decode-attention": "minillm.bench.gpu_decode:decode_attention",
    "few-bits": "minillm.bench.gpu_model:few_bits",
    "specialized-tests": "minillm.bench.gpu_tests:specialized_tests",
    "specialized": "minillm.bench.gpu_kernels:specialized",
    "flex": "minillm.bench.gpu_second:flex",
    "transformers": "minillm.bench.gpu_second:transformers",
    "lessons": "minillm.bench.gpu_second:lessons",
}

Part = Callable[[Recording, bool], None]


def bench(
    device: torch.device, folder: Path, *, parts: Sequence[str] = (), second: bool = False,
    tiny: bool = False, minutes: float = MINUTES,
) -> list[Path]:  # fmt: skip
    """Run the parts one after another within `minutes`; returns the files written: JSON, log.

    parts: by default the first set, or the second one. ValueError for a name that is none, and for
    minutes that are not positive.
    """
    for name in parts:
        _check_part(name)
    if not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes is {minutes:g}; give a positive number of minutes.")
    ends = time.monotonic() + 60 * minutes
    kind = "chosen" if parts else "second" if second else "first"
    limits = {n: (FIRST | SECOND)[n] for n in parts or (SECOND if second else FIRST)}
    path = folder / f"gpu-{kind}.{hardware_label(device)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    collected = _Collected(path)
    with tempfile.TemporaryDirectory() as rows, path.with_suffix(".log").open("w") as log:
        for name in limits:
            limit = seconds_for(name, limits, ends - time.monotonic())
            command = [sys.executable, "-m", "minillm.bench", "gpu", "--part", name]
            command += ["--device", str(device), "--out", rows]
            command += ["--until", f"{time.time() + limit:.1f}"]
            command += ["--tiny"] if tiny else []
            collect = partial(collected.add, name, Path(rows), time.monotonic())
            ended = f"not begun, the {minutes:g} minutes are over"
            try:
                if limit:
                    print(f"{name}: at most {limit:.0f} s", flush=True)
                    print(f"== {name}", file=log, flush=True)
                    ended = "interrupted"
                    ended = run_for(command, limit, log.fileno(), partial(collect, "running"))
            finally:
                print(f"{name}: {collect(ended)}", flush=True)
    return [path, path.with_suffix(".log")]


class _Collected:
    """What all parts have recorded so far, in one file."""

    def __init__(self, path: Path):
        self.path = path
        self.document: dict[str, Any] = {"parts": {}}

    def add(self, name: str, folder: Path, start: float, ended: str) -> str:
        """Write how a part ended, after how many seconds, and its rows; returns the former."""
        part = {"ended": f"{ended}, {time.monotonic() - start:.0f} s"}
        for file in folder.glob(f"gpu-{name}.*.json"):
            part |= json.loads(file.read_text())
        self.document["parts"][name] = part
        write_json(self.path, self.document)
        return part["ended"]


def seconds_for(name: str, limits: dict[str, int], left: float) -> float:
    """The time limit of a part: twice its share of the seconds left, at most its own limit.

    Twice, because most parts end early. So no part can use up the time of all others. 0 where not
    even a process would start.
    """
    names = list(limits)
    share = limits[name] / sum(limits[n] for n in names[names.index(name) :])
    limit = min(limits[name], 2 * share * left, left)
    return limit if limit >= 5 else 0


def run_for(command: list[str], limit: float, log: int, meanwhile: Callable[[], None]) -> str:
    """Run a command with all its children for at most `limit` seconds; returns how it ended.

    log: a file descriptor for all that they print. `meanwhile` is called every few seconds.
    """
    ends = time.monotonic() + limit
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        env=environment,
    )  # fmt: skip
    try:
        while process.poll() is None and (left := ends - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(5, left))
            meanwhile()
        code = process.poll()
    finally:  # also when this process is interrupted
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # no longer: the driver may hold it for ever
            process.wait(5)
    if code is not None:
        return "done" if code == 0 else f"failed with exit code {code}"
    stuck = ", and does not end even when killed" if process.poll() is None else ""
    return f"stopped at its limit{stuck}; what it had measured is recorded"


def _check_part(name: str) -> None:
    if name not in PARTS:
        raise ValueError(f"There is no part {name!r}; choose from {', '.join(PARTS)}.")


def run_part(
    name: str, device: torch.device, folder: Path, tiny: bool, seconds: float | None = None
) -> Path:
    """Run one part in this process; returns its file. ValueError for an unknown name.

    seconds: when it will be stopped, if it will; shortly before, the log gets a line for each
    function that it is in. The traceback of whatever it raises is recorded.
    """
    _check_part(name)
    settings = {"tiny": tiny, "seconds": seconds and round(seconds, 1)}
    recording = Recording(f"gpu-{name}", device, settings, folder)
    module, _, function = PARTS[name].partition(":")
    if seconds is not None:
        faulthandler.dump_traceback_later(max(1, seconds - 3))
    try:
        part: Part = getattr(importlib.import_module(module), function)
        torch.manual_seed(0)
        with torch.no_grad():
            part(recording, tiny)
    except BaseException:
        recording.failed(traceback.format_exc())
        raise
    finally:
        if seconds is not None:
            faulthandler.cancel_dump_traceback_later()
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
