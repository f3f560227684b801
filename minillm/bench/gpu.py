"""The first ten minutes on a GPU: `make gpu`, or `python -m minillm.bench gpu`.

Eight parts, each in a process of its own with its own time limit, so that one that hangs or breaks
the device costs its own minutes and no other's. Each writes `figures/data/gpu-PART.HARDWARE.json`
row by row. No network, no checkpoint, and no package beyond torch and triton is needed: what is
missing is a gap in the results. `--second` runs what takes longer: FlexAttention, transformers, the
lessons. `--part NAME` runs one part here; `--tiny` takes sizes with which a CPU in Triton's
interpreter goes through the same code.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from minillm.bench.recording import Recording
from minillm.folders import project_folder
from minillm.measure import matmul_peak, memory_speeds

MINUTES = 9.8
# Part: the seconds that it may take.
FIRST = {
    "ceilings": 60, "tests": 150, "forward": 120, "backward": 90, "decode-attention": 90,
    "model": 120, "matrices": 60, "engine": 120,
}  # fmt: skip
SECOND = {"flex": 180, "transformers": 240, "lessons": 300}

Part = Callable[[Recording, bool], None]


def bench(
    device: torch.device, folder: Path, *, second: bool = False, tiny: bool = False
) -> list[Path]:
    """Run the parts one after the other while there is time; returns the files in `folder`."""
    ends = time.monotonic() + 60 * MINUTES
    for name, limit in (SECOND if second else FIRST).items():
        left = ends - time.monotonic()
        if left < 20:
            print(f"{name}: not begun, the {MINUTES} minutes are over")
            continue
        command = [sys.executable, "-m", "minillm.bench", "gpu", "--part", name]
        command += ["--device", str(device), "--out", str(folder), *(["--tiny"] if tiny else [])]
        start = time.monotonic()
        try:
            code = subprocess.run(command, timeout=min(limit, left), check=False).returncode
            ended = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = "stopped at its limit; what it had measured is recorded"
        print(f"{name}: {ended}, {time.monotonic() - start:.0f} s", flush=True)
    return sorted(folder.glob("gpu-*.json"))


def run_part(name: str, device: torch.device, folder: Path, tiny: bool) -> Path:
    """One part, in this process; returns its file. ValueError for an unknown name."""
    if name not in FIRST | SECOND:
        raise ValueError(f"There is no part {name!r}; choose from {', '.join(FIRST | SECOND)}.")
    recording = Recording(f"gpu-{name}", device, {"tiny": tiny}, folder)
    module, _, function = PARTS[name].partition(":")
    part: Part = getattr(importlib.import_module(module), function)
    torch.manual_seed(0)
    with torch.inference_mode():
        part(recording, tiny)
    return recording.path


PARTS = {
    "ceilings": "minillm.bench.gpu:ceilings",
    "tests": "minillm.bench.gpu:tests",
    "forward": "minillm.bench.gpu_kernels:forward",
    "backward": "minillm.bench.gpu_kernels:backward",
    "decode-attention": "minillm.bench.gpu_kernels:decode_attention",
    "model": "minillm.bench.gpu_model:model",
    "matrices": "minillm.bench.gpu_kernels:matrices",
    "engine": "minillm.bench.gpu_model:engine",
    "flex": "minillm.bench.gpu_second:flex",
    "transformers": "minillm.bench.gpu_second:transformers",
    "lessons": "minillm.bench.gpu_second:lessons",
}


def report(recording: Recording, what: str, value: float, unit: str, **more: object) -> None:
    """Print a result and record it."""
    share = f", {more['of_bound']:.1%} of the bound" if "of_bound" in more else ""
    print(f"  {what}: {value:,.4g} {unit}{share}", flush=True)
    recording.add({"what": what, "value": value, "unit": unit} | more, {})


def ceilings(recording: Recording, tiny: bool) -> None:
    """What the chip can do: its processors, memory, and the bounds of all that follows."""
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


def tests(recording: Recording, tiny: bool) -> None:
    """The tests marked `gpu`, several at a time: most of the time is compilation."""
    if importlib.util.find_spec("pytest") is None:
        recording.gap("tests", "pytest is not installed")
        recording.add(None, {})
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-q", "--no-header", "-rf"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "2" if tiny else "8"]
    where = "tests/test_gpu.py" if tiny else "tests"
    done = subprocess.run(
        [*command, where], cwd=project_folder(), capture_output=True, text=True, check=False
    )
    print(done.stdout[-3000:])
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
    report(recording, "tests that failed", len(failed), "", failed=failed, exit=done.returncode)
