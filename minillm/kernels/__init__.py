"""The Triton kernels, one file each, what they can take, and how to read them.

A kernel is the program of one tile: many copies of it run at once, each with another
`tl.program_id`. All names in capitals are compile-time constants, except for pointers. A pointer
plus a block of offsets is a block of addresses. Blocks are named by what they hold.

    tiles.py            loading and storing one tile of rows
    flash_forward.py    softmax(Q Kᵀ) V, tile by tile
    flash_backward.py   dQ, dK and dV, with the weights computed again instead of stored
    flash_decode.py     few queries, many keys: the keys in parts, then the parts merged
    paged_attention.py  ragged queries, keys found through block tables

Triton compiles them for NVIDIA GPUs. With TRITON_INTERPRET=1 in the environment before Python
starts, NumPy runs them on the CPU, one program after the other: thousands of times slower, exact
enough to test with, and open to a debugger. The kernels check nothing; their callers
(`minillm.flash`, `minillm.paged`) ask `why_not_triton` first.
"""

import importlib.util

import torch
from torch import Tensor

MAX_D = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether this process runs its kernels in Triton's interpreter."""
    import triton  # only where it is installed

    return triton.knobs.runtime.interpret


def why_not_triton(q: Tensor, scale: float) -> str | None:
    """A sentence that says why the Triton kernels can't take this input, or None if they can."""
    if not _HAS_TRITON:
        return (
            "backend 'triton' needs the package triton, which exists for Linux; use 'sdpa' or "
            "'tiled'."
        )
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return (
            "backend 'triton' computes in float32, float16 or bfloat16, not in "
            f"{q.dtype}; convert q, k, v or use 'sdpa'."
        )
    if q.shape[-1] > MAX_D:
        return (
            f"backend 'triton' takes heads of at most {MAX_D} dimensions, not {q.shape[-1]}; "
            "use 'sdpa'."
        )
    if not scale > 0:
        return f"backend 'triton' needs a scale above 0, not {scale}; use 'sdpa'."
    if q.is_cuda:
        return None
    if not interpreted():
        return (
            f"backend 'triton' needs a CUDA device, and q is on {q.device}; use 'sdpa' or "
            "'tiled', or set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on "
            "the CPU."
        )
    if q.device.type != "cpu":
        return f"Triton's interpreter needs tensors on the CPU, and q is on {q.device}."
    if q.dtype == torch.bfloat16:
        return (
            "Triton's interpreter computes bfloat16 products wrongly; use float32 or float16 there."
        )
    return None


def rows_contiguous(x: Tensor) -> Tensor:
    """x (…, heads, D), copied if the kernels can't read it as it lies.

    They take any strides except in the last dimension, and count from head to head in 32 bits.
    """
    readable = x.stride(-1) == 1 and x.stride(-2) * x.shape[-2] < 2**31
    return x if readable else x.contiguous()
