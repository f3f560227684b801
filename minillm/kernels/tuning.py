"""Tile sizes, warps and stages of the attention kernels, and the launch that chooses among them.

How to read an entry stands in the docstring of `minillm.kernels`. The sizes of a list fit the
registers and the shared memory of compute capability 9.0 (hopper) or 8.0; float32 has no exact
matrix instruction, so its tiles are small.
Not yet timed on a GPU: a list holds what compiles without spilling registers (next to nothing, for
the gradients), without two groups of warps on the same tile, and with the next tile on its way
while one is multiplied; the one expected to be fastest first.

Two stages are too few for that: the compiler copies the next tile at the end of the loop and waits
for it at the top. With three, one tile is always on its way.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

LONG = 1024
"""On a GPU, with this many queries or more, each configuration is timed once; the fastest is kept.

With fewer, the first configuration is used.
"""

Choose = Callable[[int, torch.dtype, bool], list[triton.Config]]
"""The configurations for a head dimension, a dtype and Hopper or Ampere, the default first."""


def forward_configs(d_head: int, dtype: torch.dtype, hopper: bool = True) -> list[triton.Config]:
    """What to try for the forward kernel, the default first."""
    if dtype == torch.float32 and d_head <= 64:
        sizes = [(32, 32, 4, 2)]  # BLOCK_T, BLOCK_S, warps, stages, here and below
    elif dtype == torch.float32:
        sizes = [(32, 16, 8, 2)] if d_head <= 128 else [(16, 16, 4, 1)]
    elif d_head <= 64:
        sizes = [(128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3)]
    elif d_head <= 128:
        sizes = [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3)]
    else:
        sizes = [(128, 32, 8, 3), (64, 32, 4, 3)] if hopper else [(64, 32, 4, 3)]
    return _as_configs(sizes, SPECIALIZED=False)


def specialized_configs(d_head: int) -> list[triton.Config]:
    """Warp specialization, for 16-bit numbers and tensor descriptors.

    Not used before a measurement moves one of them into `forward_configs`.
    """
    sizes = [(128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 4, 2)] if d_head <= 128 else []
    return _as_configs(sizes, SPECIALIZED=True)


def dkv_configs(d_head: int, dtype: torch.dtype, hopper: bool = True) -> list[triton.Config]:
    """What to try for dK and dV, the default first.

    With 256 dimensions dK and dV of 64 keys fill half of all registers. Eight warps would compute
    the scores of so few keys twice with `wgmma`, so the tiles are small and use `mma.sync`.
    """
    if dtype == torch.float32:
        sizes = [(32, 32, 8, 1)] if 32 < d_head <= 64 else [(16, 16, 4, 1)]
    elif d_head <= 64:
        sizes = [(64, 128, 8, 3), (32, 128, 8, 3), (32, 64, 4, 3)]
    elif d_head <= 128:
        sizes = [(32, 128, 8, 3), (16, 128, 8, 3)]
    else:
        sizes = [(64, 32, 8, 3), (32, 16, 4, 3)] if hopper else [(32, 16, 4, 3)]
    return _as_configs(sizes)


def dq_configs(d_head: int, dtype: torch.dtype, hopper: bool = True) -> list[triton.Config]:
    """What to try for dQ, the default first."""
    if dtype == torch.float32:
        sizes = [(32, 16, 8, 1)] if d_head <= 128 else [(16, 16, 4, 1)]
    elif d_head <= 64 and hopper:
        sizes = [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3)]
    elif d_head <= 64:
        sizes = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 4, 3)]
    elif d_head <= 128 and hopper:
        sizes = [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3)]
    elif d_head <= 128:
        sizes = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3)]
    elif hopper:
        sizes = [(128, 32, 8, 3), (128, 16, 8, 3), (64, 32, 4, 3)]
    else:
        sizes = [(32, 32, 4, 3)]
    return _as_configs(sizes)


def _as_configs(sizes: list[tuple[int, int, int, int]], **constants: bool) -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_T": t, "BLOCK_S": s, **constants}, num_warps=w, num_stages=n)
        for t, s, w, n in sizes
    ]


def by_pointers(config: triton.Config) -> triton.Config:
    """The same without tensor descriptors, to compare the two ways of loading a tile."""
    kwargs = config.kwargs | {"DESCRIPTORS": False}
    return triton.Config(kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


def decode_config(d_head: int, dtype: torch.dtype, n_rows: int) -> triton.Config:
    """Keys per tile, warps and stages of the decode kernel, for tiles of that many rows.

    Enough loads in flight to keep the memory busy, within registers and shared memory.
    """
    size = 64 if d_head <= 128 else 32
    warps = 4 if n_rows <= 16 or d_head > 128 else 8
    stages = 3
    if dtype == torch.float32:
        size, warps, stages = (16, 4, 2) if n_rows <= 16 else (size // 2, 8, 1)
    return triton.Config({"BLOCK_S": size}, num_warps=warps, num_stages=stages)


def paged_config(d_head: int, dtype: torch.dtype, n_rows: int) -> triton.Config:
    """Keys per tile, warps and stages of the paged kernel, for tiles of that many rows.

    Four warps share 64 rows, the least that a group of them multiplies at once on Hopper: with
    eight, two groups would compute the same. The addresses of a tile come from the block table, one
    load before the other, which takes up stages: with five, two tiles of keys are on their way
    while a third is worked on.
    """
    size, warps, stages = 64 if d_head <= 128 else 32, 4 if n_rows <= 64 else 8, 5
    if dtype == torch.float32:
        size, warps, stages = (16, 4, 2) if n_rows <= 16 else (size // 2, 8, 1)
    return triton.Config({"BLOCK_S": size}, num_warps=warps, num_stages=stages)


def dot_size(n: int) -> int:
    """n rounded up to a size that `tl.dot` takes: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(n))


def is_hopper(x: Tensor) -> bool:
    """Whether x lies on a GPU of compute capability 9.0 or more; true of other devices as well."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)


def takes_descriptors(*tensors: Tensor) -> bool:
    """Whether the copy engine can read q, k and v (B, T or S, heads, D) as they lie.

    From compute capability 9.0 on; addresses and strides must be multiples of 16 bytes. A row that
    is repeated (`expand`) has a stride of 0, which is no matrix to the engine. Only in 16 bits,
    where the matrix instruction takes the tile from the shared memory that it arrives in.
    """
    if tensors[0].itemsize != 2 or not is_hopper(tensors[0]):
        return False
    return all(
        x.data_ptr() % 16 == 0
        and x.stride()[1] > 0
        and all(s * x.itemsize % 16 == 0 for s in x.stride()[:3])
        for x in tensors
    )


def _descriptor_memory(
    device: torch.device, size: int, alignment: int, stream: int | None
) -> Tensor:
    """An allocator for Triton: each program keeps its tensor descriptors in memory from here."""
    return torch.empty(size, dtype=torch.int8, device=device)


@functools.cache
def tuner(
    kernel: triton.JITFunction, choose: Choose, d_head: int, dtype: torch.dtype, hopper: bool
) -> triton.runtime.Autotuner:
    """The kernel that times all configurations once for each LENGTH, mask and way of loading."""
    keys = [key for key in ("LENGTH", "CAUSAL", "DESCRIPTORS") if key in kernel.arg_names]
    return triton.autotune(choose(d_head, dtype, hopper), key=keys, cache_results=True)(kernel)


def launch(
    kernel: triton.JITFunction, choose: Choose, tile: str, q: Tensor, written: Tensor,
    arguments: tuple[Any, ...], constants: dict[str, Any], config: triton.Config | None,
) -> None:  # fmt: skip
    """Start a program for each tile of each head of `written` (B, rows, heads, D).

    tile: the constant that holds the rows of a tile. q (B, T, H, D): its T, D, dtype and device
    decide. config: for measurements, and what it sets overrides `constants`; else the first of
    `choose`, or the fastest of them for LONG queries and more.
    """
    B, n_rows, n_heads, _ = written.shape

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(n_rows, meta[tile]) * B * n_heads,)

    if constants.get("DESCRIPTORS"):
        triton.set_allocator(functools.partial(_descriptor_memory, q.device))
    T, D = q.shape[1], q.shape[3]
    if q.is_cuda and T >= LONG and config is None:
        tuner(kernel, choose, D, q.dtype, is_hopper(q))[grid](*arguments, **constants)
    else:
        chosen = config or choose(D, q.dtype, is_hopper(q))[0]
        kernel[grid](*arguments, **(constants | chosen.all_kwargs()))
