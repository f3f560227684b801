"""Parts of `minillm.bench.gpu` that time what a decode step does: attention and matrices.

Bound: the bytes read over the memory bandwidth.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.gpu_kernels import Calls, bounds, kernel_dtype, time_calls
from minillm.bench.recording import Recording
from minillm.bench.serve_gpu import paged_and_contiguous


def decode_attention(recording: Recording, tiny: bool) -> None:
    """One new token of each sequence: the keys in parts; pages in 16, 8 and 4 bits."""
    _, bandwidth = bounds(recording, tiny)
    for S in (64,) if tiny else (2048, 8192, 32768, 131072):
        for B in (1,) if tiny else (1, 4, 16, 64):
            _time_key_parts(recording, B, S, bandwidth, tiny)
    _time_pages(recording, bandwidth, tiny)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _time_key_parts(recording: Recording, B: int, S: int, bandwidth: float, tiny: bool) -> None:
    """`flash_decode` of S keys of B sequences, with different numbers of parts."""
    from minillm.kernels import flash_decode as kernel

    device, dtype = recording.device, kernel_dtype(recording.device)
    K, D = (1, 16) if tiny else (8, 128)
    H = 4 * K
    n_bytes = 2 * B * S * K * D * 2  # of keys and values, in 16 bits
    if n_bytes > 40e9:
        return
    n_caches = 1 if tiny else max(1, int(1e9 / n_bytes))  # far more than the L2 cache holds
    q = torch.randn(B, 1, H, D, device=device, dtype=dtype)
    caches = torch.randn(n_caches, 2, B, S, K, D, device=device, dtype=dtype)
    choices = {}  # by parts: different numbers of programs may mean the same number of parts
    for each in (4, 3, 2, 1):
        choices[max(1, min(each * _processors(device) // (B * K), 128, S // 64))] = each
    calls: Calls = {}
    for n_parts, each in list(choices.items())[: 1 if tiny else None]:
        attend = partial(kernel.flash_decode, causal=True, scale=D**-0.5, n_parts=n_parts)
        all_caches = partial(_each, [partial(attend, q, k, v) for k, v in caches])
        calls[f"{each} programs a processor"] = all_caches
    label, work = f"decode, {S} keys, batch {B}", n_bytes * n_caches
    time_calls(recording, calls, label, work, bandwidth, memory=True)


def _time_pages(recording: Recording, bandwidth: float, tiny: bool) -> None:
    """Paged attention with pipelines of several depths, in fewer bits, and contiguous attention."""
    import triton

    from minillm.kernels import paged_attention

    n, length = (2, 64) if tiny else (64, 2048)
    label = f"paged, {n} sequences of {length}"
    calls: Calls = {}
    work: dict[str, float] = {}

    def with_stages(call: Callable[[], Any], stages: int) -> None:
        chosen = triton.Config({"BLOCK_S": 64}, num_warps=4, num_stages=stages)
        with patch.object(paged_attention, "paged_config", lambda *_: chosen):
            call()

    # Bytes of one head's 128 numbers and their scales in float16; 4 bits have a minimum as well.
    plain = 128 * (2 if recording.device.type == "cuda" else 4)
    sizes = {None: plain, "int8": 128 + 2, "int4": 64 + 4}
    for kv_dtype, size in sizes.items():
        both = paged_and_contiguous(recording.device, n, length, kv_dtype)
        n_bytes = 2 * n * length * 8 * size  # keys and values, 8 heads
        for stages in (5,) if tiny else (3, 5, 7) if kv_dtype is None else (3, 4, 5):
            name = f"{kv_dtype or 'plain'} pages, {stages} stages"
            calls[name], work[name] = partial(with_stages, both["paged"], stages), n_bytes
        if kv_dtype is None:
            calls["contiguous"], work["contiguous"] = both["contiguous"], n_bytes
    time_calls(recording, calls, label, work, bandwidth, memory=True)


def matrices(recording: Recording, tiny: bool) -> None:
    """Llama-3-8B's matrices times 1 to 64 rows: in PyTorch, and in our own 16, 8 and 4 bits."""
    device, dtype = recording.device, kernel_dtype(recording.device)
    _, bandwidth = bounds(recording, tiny)
    shapes = {
        "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096),
        "down": (4096, 14336), "head": (128256, 4096),
    }  # fmt: skip
    for name, (N, K) in {"tiny": (70, 128)}.items() if tiny else shapes.items():
        n_copies = 1 if tiny else max(1, int(1e9 / (N * K)))  # far more than the L2 cache holds
        forms = _stored_forms(n_copies, N, K, dtype, device)
        for M in (3,) if tiny else (1, 4, 16, 64):
            x = torch.randn(M, K, device=device, dtype=dtype)
            calls, work = _products(x, forms, sweep=M == 1)
            label = f"{name} ({N} × {K}), {M} rows"
            time_calls(recording, calls, label, work, bandwidth, memory=True)


def _products(
    x: Tensor, forms: dict[str, list[tuple[Tensor, ...]]], *, sweep: bool
) -> tuple[Calls, dict[str, float]]:
    """The products of x with each form, and the bytes that each reads.

    sweep: our own also with more programs a processor, each with fewer columns.
    """
    from minillm.kernels.few_rows import BLOCK_N, few_rows_linear

    calls: Calls = {}
    work: dict[str, float] = {}

    def add(name: str, product: Callable[..., Tensor], copies: list[tuple[Tensor, ...]]) -> None:
        calls[name] = partial(_each, [partial(product, x, *copy) for copy in copies])
        work[name] = sum(t.nbytes for copy in copies for t in copy)

    for form, copies in forms.items():
        if form.startswith("PyTorch"):
            add(form, F.linear, copies)
            continue
        add(form, few_rows_linear, copies)
        n_tiles, most = -(-copies[0][0].shape[0] // BLOCK_N), x.shape[1] // 128
        for each in (4, 8) if sweep else ():
            n_parts = max(1, min(each * _processors(x.device) // n_tiles, most))
            several = partial(few_rows_linear, n_parts=n_parts)
            add(f"{form}, {each} programs a processor", several, copies)
    return calls, work


def _stored_forms(
    n: int, N: int, K: int, dtype: torch.dtype, device: torch.device
) -> dict[str, list[tuple[Tensor, ...]]]:
    """n matrices (N, K) in each form, those in 8 and 4 bits with scales."""
    plain, bytes_, pairs = [], [], []
    for _ in range(n):
        plain.append((torch.randn(N, K, device=device, dtype=dtype),))
        q = torch.randint(-127, 127, (N, K), device=device, dtype=torch.int8)
        bytes_.append((q, torch.rand(N, device=device)))
        scale, zero = torch.rand(2, N, K // 32, device=device).to(dtype)
        pairs.append((q.view(torch.uint8)[:, : K // 2].contiguous(), scale, zero))
    return {"PyTorch, 16 bits": plain, "16 bits": plain, "8 bits": bytes_, "4 bits": pairs}


def _each(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()
