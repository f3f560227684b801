"""Measuring this machine: time, memory bandwidth and the speed of matrix products.

The bounds that lessons and benchmarks compare with are these: the most bytes per second that a
matrix-vector product reads its matrix with (what a decode step does with the weights), and the
most FLOP/s that a large matrix product reaches. A peak is the best of several runs, since a
slower run was only disturbed; everything else is a median.
"""

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call of `fn()`, the GPU's work included, and none that was queued before."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def seconds_per_call(
    fn: Callable[[], Any],
    device: torch.device,
    repeats: int = 7,
    statistic: Callable[[list[float]], float] = median,
) -> float:
    """`statistic` of the `seconds` of `repeats` calls of `fn()`, after two calls to warm up."""
    return statistic([seconds(fn, device) for _ in range(repeats + 2)][2:])


def _large_matrix(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Larger than any cache, so that it is read from memory: 512 MiB on a CPU, 2 GiB on a GPU."""
    rows, columns = (1 << 17, 1 << 13) if device.type == "cuda" else (1 << 16, 1 << 11)
    return torch.ones(rows, columns, device=device, dtype=dtype)


@torch.inference_mode()
def read_bandwidth(
    device: torch.device, dtype: torch.dtype, matrix: torch.Tensor | None = None
) -> float:
    """Bytes per second at which a matrix-vector product reads its matrix. Takes about 0.5 s."""
    matrix = _large_matrix(device, dtype) if matrix is None else matrix
    vector = torch.ones(matrix.shape[1], device=device, dtype=dtype)
    return matrix.nbytes / seconds_per_call(partial(torch.mv, matrix, vector), device, 15, min)


@torch.inference_mode()
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    n = 8192 if device.type == "cuda" else 2048
    # Random numbers: a product of zeros draws less power and runs faster.
    square = torch.randn(n, n, device=device).to(dtype)
    return 2 * n**3 / seconds_per_call(partial(torch.mm, square, square), device, 15, min)


@torch.inference_mode()
def measure(device: torch.device) -> dict[str, Any]:
    """The fields of a `minillm.Hardware` for this machine, by name. Takes 2 to 5 seconds."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
    else:
        name = f"{cpu_name()} ({torch.get_num_threads()} threads)"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        dtypes = (torch.float32,)
    matrix = _large_matrix(device, dtypes[0])
    source, target = matrix.chunk(2)
    copy_seconds = seconds_per_call(lambda: target.copy_(source), device, 7, min)
    return {
        "name": name,
        "memory_bytes": memory,
        "bandwidth": read_bandwidth(device, dtypes[0], matrix),
        "peak_flops": {str(d).removeprefix("torch."): matmul_peak(device, d) for d in dtypes},
        "source": "measured on this machine",
        "copy_bandwidth": 2 * source.nbytes / copy_seconds,
    }


def cpu_name() -> str:
    """The processor's name as the system gives it, or "CPU"."""
    try:
        with open("/proc/cpuinfo") as f:
            names = (line.split(":", 1)[1] for line in f if line.startswith("model name"))
            return next(names).strip()
    except (OSError, StopIteration):
        return platform.processor() or "CPU"
