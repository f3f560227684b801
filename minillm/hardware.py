"""Peaks of known chips, measured peaks of this one, and the roofline.

Source of the model: Williams, Waterman and Patterson 2009, "Roofline". A computation takes at least
max(FLOPs / peak, bytes / bandwidth). The ratio peak / bandwidth, the ridge point, is the arithmetic
intensity (FLOPs per byte) above which arithmetic limits a chip and below which memory does.
Peaks are the manufacturers' figures for dense products (no 2:4 sparsity), in FLOP/s and bytes/s; GB
is 10⁹ bytes.
Not here: caches, launch overhead, interconnects. They are part of the gap between measured times
and the roofline.
"""

from dataclasses import dataclass
from typing import Any

GB, TERA = 10**9, 10**12


@dataclass(frozen=True)
class Hardware:
    """One device: memory in bytes, bandwidth in bytes/s, and peak FLOP/s by dtype name.

    source: where the numbers come from.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: dict[str, float]
    source: str
    copy_bandwidth: float | None = None  # measured only: bytes/s read plus bytes/s written

    @staticmethod
    def preset(name: str) -> "Hardware":
        """One of the published chips in `PRESETS`, by name; ValueError for any other name."""
        if name not in PRESETS:
            raise ValueError(
                f"There is no hardware preset {name!r}; choose one of {', '.join(PRESETS)}."
            )
        return PRESETS[name]

    @staticmethod
    def measure(device: Any = "cpu") -> "Hardware":
        """This machine's read and copy bandwidth and matmul peaks, in about 5 seconds.

        device: a name or a torch.device. `bandwidth` is the median of three measurements by
        `minillm.measure.read_bandwidth`.
        """
        import torch  # here, so that presets and the roofline work without it

        from minillm.measure import measure

        return Hardware(**measure(torch.device(device)))

    def peak(self, dtype: Any) -> float:
        """Peak FLOP/s for a dtype name or torch.dtype; ValueError if this chip has no figure."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no {name} peak; known are {', '.join(self.peak_flops)}."
            )
        return self.peak_flops[name]

    def ridge_point(self, dtype: Any) -> float:
        """FLOPs per byte at which arithmetic and memory take equally long."""
        return self.peak(dtype) / self.bandwidth


def roofline_seconds(hardware: Hardware, flops: float, n_bytes: float, dtype: Any) -> float:
    """Lower bound in seconds on `hardware`: the longer of arithmetic and memory time."""
    return max(flops / hardware.peak(dtype), n_bytes / hardware.bandwidth)


def _chip(name: str, memory_gb: float, gb_per_s: float, source: str, **tflops: float) -> Hardware:
    peaks = {dtype: value * TERA for dtype, value in tflops.items()}
    return Hardware(name, int(memory_gb * GB), gb_per_s * GB, peaks, source)


PRESETS: dict[str, Hardware] = {
    chip.name: chip
    for chip in (
        _chip("v100", 32, 900, "NVIDIA V100 datasheet (SXM2, 32 GB), 2020",
              float32=15.7, float16=125),
        _chip("a100-40gb", 40, 1555, "NVIDIA A100 datasheet (SXM, 40 GB), 2020",
              float32=19.5, float16=312, bfloat16=312, int8=624),
        _chip("a100-80gb", 80, 2039, "NVIDIA A100 datasheet (SXM, 80 GB), 2021",
              float32=19.5, float16=312, bfloat16=312, int8=624),
        _chip("h100", 80, 3350,
              "NVIDIA H100 datasheet (SXM5), 2023; dense is half the figure with sparsity",
              float32=67, float16=989.5, bfloat16=989.5, float8=1979, int8=1979),
        _chip("h200", 141, 4800,
              "NVIDIA H200 datasheet (SXM), 2024; dense is half the figure with sparsity",
              float32=67, float16=989.5, bfloat16=989.5, float8=1979, int8=1979),
        _chip("l4", 24, 300, "NVIDIA L4 datasheet, 2023; dense is half the figure with sparsity",
              float32=30.3, float16=121, bfloat16=121, float8=242.5, int8=242.5),
        _chip("t4", 16, 320, "NVIDIA T4 datasheet, 2019",
              float32=8.1, float16=65, int8=130, int4=260),
        _chip("rtx-4090", 24, 1008,
              "NVIDIA Ada GPU architecture whitepaper, 2023, table 2 (products summed in float32)",
              float32=82.6, float16=165.2, bfloat16=165.2, float8=330.3, int8=660.6),
        _chip("m1-max", 64, 400, "Apple newsroom, October 2021 (32-core GPU)", float32=10.4),
        _chip("m1-ultra", 128, 800, "Apple newsroom, March 2022 (64-core GPU)", float32=21),
        _chip("epyc-9654", 768, 460.8,
              "AMD EPYC 9654 data: 12 channels DDR5-4800; 96 cores * 2.4 GHz * 32 FLOPs; "
              "memory as 12 * 64 GB",
              float32=7.37),
    )
}  # fmt: skip
