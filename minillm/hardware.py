"""Peaks of known chips, measured peaks of this one, and the roofline.

Source of the model: Williams, Waterman and Patterson 2009, "Roofline". A computation takes at least
max(FLOPs / peak, bytes / bandwidth); the ratio peak / bandwidth, the ridge point, is the arithmetic intensity
(FLOPs per byte) above which a chip is limited by arithmetic and below which by memory.
Peaks are the makers' figures for dense products (no 2:4 sparsity), in FLOP/s and bytes/s; GB is 10⁹ bytes.
Not here: caches, launch overhead, interconnects. Measured times show those as the gap to the roofline.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

GB, TERA = 10**9, 10**12


@dataclass(frozen=True)
class Hardware:
    """One device: memory in bytes, bandwidth in bytes/s, peak FLOP/s by dtype name, and where the numbers come from."""

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: dict[str, float]
    source: str
    copy_bandwidth: float | None = None  # measured only: bytes read plus bytes written per second by a copy

    @staticmethod
    def preset(name: str) -> "Hardware":
        """One of the published chips in `PRESETS`, by name."""
        if name not in PRESETS:
            raise ValueError(f"There is no hardware preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return PRESETS[name]

    @staticmethod
    def measure(device: str | torch.device = "cpu") -> "Hardware":
        """This machine's read bandwidth (a matrix-vector product), copy bandwidth and matmul peak. Takes 2 to 5 seconds.

        `bandwidth` is that of the matrix-vector product: it is what a decode step does with its weights.
        """
        return _measure(torch.device(device))

    def peak(self, dtype: Any) -> float:
        """Peak FLOP/s for a dtype name or torch.dtype; ValueError when this chip has no figure for it."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.peak_flops:
            raise ValueError(f"{self.name} has no {name} peak; known are {', '.join(self.peak_flops)}.")
        return self.peak_flops[name]

    def ridge_point(self, dtype: Any) -> float:
        """FLOPs per byte at which arithmetic and memory take equally long."""
        return self.peak(dtype) / self.bandwidth


def roofline_seconds(hardware: Hardware, flops: float, n_bytes: float, dtype: Any) -> float:
    """Least time for `flops` and `n_bytes` on `hardware`: whichever of arithmetic and memory takes longer."""
    return max(flops / hardware.peak(dtype), n_bytes / hardware.bandwidth)


def _chip(name: str, memory_gb: float, gb_per_s: float, source: str, **tflops: float) -> Hardware:
    peaks = {dtype: value * TERA for dtype, value in tflops.items()}
    return Hardware(name, int(memory_gb * GB), gb_per_s * GB, peaks, source)


PRESETS: dict[str, Hardware] = {
    chip.name: chip
    for chip in (
        _chip("v100", 32, 900, "NVIDIA V100 datasheet (SXM2, 32 GB), 2020", float32=15.7, float16=125),
        _chip("a100-40gb", 40, 1555, "NVIDIA A100 datasheet (SXM, 40 GB), 2020", float32=19.5, float16=312, bfloat16=312, int8=624),
        _chip("a100-80gb", 80, 2039, "NVIDIA A100 datasheet (SXM, 80 GB), 2021", float32=19.5, float16=312, bfloat16=312, int8=624),
        _chip("h100", 80, 3350, "NVIDIA H100 datasheet (SXM5), 2023; dense is half the figure with sparsity",
              float32=67, float16=989.5, bfloat16=989.5, float8=1979, int8=1979),
        _chip("h200", 141, 4800, "NVIDIA H200 datasheet (SXM), 2024; dense is half the figure with sparsity",
              float32=67, float16=989.5, bfloat16=989.5, float8=1979, int8=1979),
        _chip("l4", 24, 300, "NVIDIA L4 datasheet, 2023; dense is half the figure with sparsity",
              float32=30.3, float16=121, bfloat16=121, float8=242.5, int8=242.5),
        _chip("t4", 16, 320, "NVIDIA T4 datasheet, 2019", float32=8.1, float16=65, int8=130, int4=260),
        _chip("rtx-4090", 24, 1008, "NVIDIA Ada GPU architecture whitepaper, 2023, table 2 (products summed in float32)",
              float32=82.6, float16=165.2, bfloat16=165.2, float8=330.3, int8=660.6),
        _chip("m1-max", 64, 400, "Apple newsroom, October 2021 (32-core GPU)", float32=10.4),
        _chip("m1-ultra", 128, 800, "Apple newsroom, March 2022 (64-core GPU)", float32=21),
        _chip("epyc-9654", 768, 460.8, "AMD EPYC 9654 data: 12 channels DDR5-4800; 96 cores * 2.4 GHz * 32 FLOPs; memory as 12 * 64 GB",
              float32=7.37),
    )
}  # fmt: skip


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call of `fn()`, the GPU's work included, and none that was waiting before."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def seconds_per_call(
    fn: Callable[[], Any], device: torch.device, repeats: int = 7, statistic: Callable[[list[float]], float] = median
) -> float:
    """`seconds` of `fn()` after two warm-up calls: the median of `repeats`.

    A peak takes the best instead (statistic=min): whatever is slower was disturbed.
    """
    return statistic([seconds(fn, device) for _ in range(repeats + 2)][2:])


def _large_matrix(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """More bytes than any cache holds, so that they come from memory: 512 MiB on a CPU, 2 GiB on a GPU."""
    rows, columns = (1 << 17, 1 << 13) if device.type == "cuda" else (1 << 16, 1 << 11)
    return torch.ones(rows, columns, device=device, dtype=dtype)


@torch.inference_mode()
def read_bandwidth(device: torch.device, dtype: torch.dtype, matrix: torch.Tensor | None = None) -> float:
    """Bytes per second that a matrix-vector product reads its matrix with, about half a second's measurement."""
    matrix = _large_matrix(device, dtype) if matrix is None else matrix
    vector = torch.ones(matrix.shape[1], device=device, dtype=dtype)
    return matrix.nbytes / seconds_per_call(partial(torch.mv, matrix, vector), device, 15, min)


@torch.inference_mode()
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    n = 8192 if device.type == "cuda" else 2048
    square = torch.randn(n, n, device=device).to(dtype)  # random: a product of zeros draws less power and runs faster
    return 2 * n**3 / seconds_per_call(partial(torch.mm, square, square), device, 15, min)


@torch.inference_mode()
def _measure(device: torch.device) -> Hardware:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory, dtypes = properties.name, properties.total_memory, (torch.bfloat16, torch.float16, torch.float32)
    else:
        name, memory, dtypes = f"{cpu_name()} ({torch.get_num_threads()} threads)", _ram_bytes(), (torch.float32,)
    dtype = dtypes[0]
    matrix = _large_matrix(device, dtype)
    source, target = matrix.chunk(2)
    copy_bandwidth = 2 * source.nbytes / seconds_per_call(lambda: target.copy_(source), device, 7, min)
    bandwidth = read_bandwidth(device, dtype, matrix)
    peaks = {str(d).removeprefix("torch."): matmul_peak(device, d) for d in dtypes}
    return Hardware(name, memory, bandwidth, peaks, "measured on this machine", copy_bandwidth)


def cpu_name() -> str:
    """The processor's name as the system gives it, or "CPU"."""
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
