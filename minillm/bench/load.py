"""Loading the default checkpoint in a new process: seconds, and peak memory over the model's."""

import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from minillm.bench.recording import Recording
from minillm.weights.default import fetch_default

# VmHWM is the process's own peak; getrusage, which exists everywhere, starts from the parent's
# peak on Linux.
_PROBE = """
import pathlib, re, resource, sys, time
import gguf, tiktoken, torch
import minillm, minillm.weights

def peak_bytes():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS

before = peak_bytes()
start = time.perf_counter()
model, _ = minillm.load(sys.argv[1], device=sys.argv[2])
elapsed = time.perf_counter() - start
print(elapsed, peak_bytes() - before, sum(p.nbytes for p in model.parameters()))
"""


def bench(device: torch.device) -> Path:
    """Measure the default checkpoint."""
    default = fetch_default()
    recording = Recording("load", device, {"model": default.stem})
    measure_load(recording, default)
    return recording.path


def measure_load(recording: Recording, checkpoint: Path, *, repeats: int = 5) -> None:
    """Two rows: seconds, and on a CPU peak memory as a multiple of the model's bytes."""
    device = recording.device
    measured: dict[str, list[float]] = {"seconds": [], "peak_bytes": [], "model_bytes": []}
    for _ in range(repeats):
        command = [sys.executable, "-c", _PROBE, str(checkpoint), str(device)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for key, value in zip(measured, map(float, out.split()), strict=True):
            measured[key].append(value)
    took = median(measured["seconds"])
    print(f"load: {took:.2f} s")
    recording.add({"what": "load the default checkpoint", "value": took, "unit": "s"}, measured)
    if device.type == "cpu":  # only the host's memory was counted
        peak, model_bytes = median(measured["peak_bytes"]), median(measured["model_bytes"])
        ratio = peak / model_bytes
        print(
            f"  peak memory {peak / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB: "
            f"{ratio:.2f} ×"
        )
        what = "peak memory while loading, over the model's bytes"
        recording.add({"what": what, "value": ratio, "unit": "×"}, {})
