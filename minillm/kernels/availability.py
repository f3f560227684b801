"""Which inputs the kernels take and where they run, and sentences that say why not."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

MAX_D = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether this process runs its kernels in Triton's interpreter."""
    import triton  # only where it is installed

    return triton.knobs.runtime.interpret


def why_not_triton(q: Tensor, scale: float) -> str | None:
    """A sentence that says why the attention kernels can't take this input, or None."""
    if _HAS_TRITON and q.shape[-1] > MAX_D:
        return (
            f"backend 'triton' takes heads of at most {MAX_D} dimensions, not {q.shape[-1]}; "
            "use 'sdpa'."
        )
    if _HAS_TRITON and not scale > 0:
        return f"backend 'triton' needs a scale above 0, not {scale}; use 'sdpa'."
    return why_not_here(q, "backend 'triton'", "use 'sdpa' or 'tiled'")


def why_not_here(x: Tensor, what: str, instead: str) -> str | None:
    """A sentence that says why no kernel can take a tensor like x, or None.

    what: the name of the kernels in that sentence. instead: the advice it ends with.
    """
    if not _HAS_TRITON:
        return f"{what} needs the package triton, which exists for Linux; {instead}."
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return (
            f"{what} computes in float32, float16 or bfloat16, not in {x.dtype}; convert to one of "
            f"them, or {instead}."
        )
    if x.is_cuda:
        return None
    if not interpreted():
        return (
            f"{what} needs a CUDA device, and the tensors are on {x.device}; {instead}, or set "
            "TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU."
        )
    if x.device.type != "cpu":
        return f"Triton's interpreter needs tensors on the CPU, and these are on {x.device}."
    if x.dtype == torch.bfloat16:
        return (
            "Triton's interpreter computes bfloat16 products wrongly; use float32 or float16 there."
        )
    return None


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels launched in this context run on x's GPU, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def rows_contiguous(x: Tensor) -> Tensor:
    """x (…, heads, D), copied if the kernels can't read it in place.

    The last dimension must be contiguous, and offsets from head to head must fit into 32 bits.
    """
    readable = x.stride(-1) == 1 and x.stride(-2) * x.shape[-2] < 2**31
    return x if readable else x.contiguous()
