"""Parts of `minillm.bench.gpu` that time kernels alone: every configuration, by name.

Bounds: for attention, its FLOPs over the peak of matrix products; for decode attention and for
matrices times few rows, the bytes read over the memory bandwidth.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.attention import attention_peers
from minillm.bench.gpu import report
from minillm.bench.recording import Recording, kernel_seconds
from minillm.layers.attention import attention
from minillm.measure import matmul_peak, read_bandwidth

Named = Iterator[tuple[str, Callable[[], Any]]]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def _bounds(recording: Recording, tiny: bool) -> tuple[float, float]:
    """FLOP/s and bytes/s; with `tiny`, which only tests the code, unreachable numbers."""
    if tiny:
        return 1e18, 1e18
    device = recording.device
    return matmul_peak(device, _dtype(device)), read_bandwidth(device, _dtype(device))


def time_calls(
    recording: Recording, calls: Named, label: str, work: float, bound: float,
    *, memory: bool = False,
) -> None:  # fmt: skip
    """A row for each call: its work per second against `bound`. A call that fails is a gap.

    work: FLOPs; with `memory`, bytes, of kernels so short that they are timed as a graph.
    """
    scale, unit = (1e9, "GB/s") if memory else (1e12, "TFLOP/s")
    for name, call in calls:
        try:
            speed = work / kernel_seconds(call, recording.device, as_graph=memory)
            report(recording, f"{label}, {name}", speed / scale, unit, of_bound=speed / bound)
        except Exception as error:  # the compiler's or the driver's: go on with the others
            recording.gap(f"{label}, {name}", str(error).partition("\n")[0] or repr(error))


def _config_name(config: Any) -> str:
    kwargs = config.kwargs
    kind = " specialized" if kwargs.get("SPECIALIZED") else ""
    tile = f"{kwargs['BLOCK_T']} × {kwargs['BLOCK_S']}"
    return f"{tile}, {config.num_warps} warps, {config.num_stages} stages{kind}"


def forward(recording: Recording, tiny: bool) -> None:
    """Every configuration of the forward kernel, its errors, and PyTorch's kernels beside it."""
    from minillm.kernels.flash_forward import flash_forward
    from minillm.kernels.tuning import by_pointers, forward_configs

    device, dtype = recording.device, _dtype(recording.device)
    peak, _ = _bounds(recording, tiny)
    for D in (128, 64):
        q, k, v = torch.randn(3, 1, 64 if tiny else 1024, 2, D, device=device, dtype=dtype)
        # The reference in float64, on fewer tokens than the timed cases: it stores all scores.
        exact = attention(*(x.double() for x in (q, k, v)), backend="reference")
        for name, backend in (("ours", "triton"), ("PyTorch's", "sdpa")):
            error = (attention(q, k, v, backend=backend).double() - exact).abs().max()
            report(recording, f"largest error, D {D}, {name}", float(error), "")
    for D, N, q, k, v, flops in _prompts(recording, tiny):
        run = partial(flash_forward, q, k, v, True, D**-0.5)
        calls: dict[str, Callable[[], Any]] = {}
        for config in forward_configs(D, dtype):
            calls[_config_name(config)] = partial(run, config)
            calls[_config_name(config) + ", pointers"] = partial(run, by_pointers(config))
        if device.type == "cuda":
            peers = attention_peers(device)
            for peer in ("flash", "cudnn"):
                calls[peer] = partial(peers[peer], q, k, v, True)
        time_calls(recording, iter(calls.items()), f"forward, D {D}, N {N}", flops, peak)


def specialized(recording: Recording, tiny: bool) -> None:
    """Warp specialization: none of these has run anywhere, so they come late and alone."""
    from minillm.kernels.flash_forward import flash_forward
    from minillm.kernels.tuning import specialized_configs

    peak, _ = _bounds(recording, tiny)
    for D, N, q, k, v, flops in _prompts(recording, tiny):
        run = partial(flash_forward, q, k, v, True, D**-0.5)
        calls = ((_config_name(c), partial(run, c)) for c in specialized_configs(D))
        time_calls(recording, calls, f"forward, D {D}, N {N}", flops, peak)


def _prompts(
    recording: Recording, tiny: bool
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, float]]:
    """D, N, q, k, v and the FLOPs of causal attention, for each case; the largest first."""
    device, dtype = recording.device, _dtype(recording.device)
    for D in (128, 64):
        for N in (64,) if tiny else (16384, 4096):
            B, H = (1, 1) if tiny else (16384 // N, 2048 // D)
            q, k, v = torch.randn(3, B, N, H, D, device=device, dtype=dtype)
            yield D, N, q, k, v, 4 * B * H * N**2 * D / 2


# The previous defaults, for comparison: two groups of warps on one tile.
_BEFORE = {("dkv", 128): (32, 64, 8, 2), ("dq", 128): (64, 64, 8, 2)}


def backward(recording: Recording, tiny: bool) -> None:
    """Every configuration of the two backward kernels: dK and dV, and dQ."""
    import triton

    from minillm.kernels import flash_backward as kernel
    from minillm.kernels.flash_forward import flash_forward
    from minillm.kernels.tuning import dkv_configs, dq_configs

    dtype = _dtype(recording.device)
    peak, _ = _bounds(recording, tiny)
    kinds = {"dkv": (kernel.grad_kv, dkv_configs), "dq": (kernel.grad_q, dq_configs)}
    for D, N, q, k, v, flops in _prompts(recording, tiny):
        scale, grad = D**-0.5, torch.randn_like(q)
        out, lse = flash_forward(q, k, v, True, scale)
        delta = kernel.row_sums(grad, out, lse)
        for kind, (run, choose) in kinds.items():
            configs = choose(D, dtype)
            if (kind, D) in _BEFORE and not tiny:
                t, s, warps, stages = _BEFORE[kind, D]
                configs.append(triton.Config({"BLOCK_T": t, "BLOCK_S": s}, warps, stages))
            call = partial(run, grad, q, k, v, lse, delta, True, scale)
            calls = ((_config_name(config), partial(call, config)) for config in configs)
            # The forward pass has 2 products; dK and dV take 4, dQ takes 3.
            work = flops * (2 if kind == "dkv" else 1.5)
            time_calls(recording, calls, f"{kind}, D {D}, N {N}", work, peak)


def decode_attention(recording: Recording, tiny: bool) -> None:
    """One new token of each sequence: the keys in parts, and pages with deeper pipelines."""
    _, bandwidth = _bounds(recording, tiny)
    for S in (64,) if tiny else (2048, 8192, 32768, 131072):
        for B in (1,) if tiny else (1, 4, 16, 64):
            _time_key_parts(recording, B, S, bandwidth, tiny)
    _time_pages(recording, bandwidth, tiny)


def _time_key_parts(recording: Recording, B: int, S: int, bandwidth: float, tiny: bool) -> None:
    """`flash_decode` of S keys of B sequences, with different numbers of parts."""
    from minillm.kernels import flash_decode as kernel

    device, dtype = recording.device, _dtype(recording.device)
    K, D = (1, 16) if tiny else (8, 128)
    H = 4 * K
    n_bytes = 2 * B * S * K * D * 2  # of keys and values, in 16 bits
    if n_bytes > 40e9:
        return
    n_caches = 1 if tiny else max(1, int(1e9 / n_bytes))  # far more than the L2 cache holds
    q = torch.randn(B, 1, H, D, device=device, dtype=dtype)
    caches = torch.randn(n_caches, 2, B, S, K, D, device=device, dtype=dtype)
    processors = 2
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    choices = {}  # by parts: different numbers of programs may mean the same number of parts
    for each in (4, 3, 2, 1):
        choices[max(1, min(each * processors // (B * K), 128, S // 64))] = each
    for n_parts, each in list(choices.items())[: 1 if tiny else None]:
        attend = partial(kernel.flash_decode, causal=True, scale=D**-0.5, n_parts=n_parts)
        all_caches = partial(_each, [partial(attend, q, k, v) for k, v in caches])
        calls = iter([(f"{each} programs a processor", all_caches)])
        label, work = f"decode, {S} keys, batch {B}", n_bytes * n_caches
        time_calls(recording, calls, label, work, bandwidth, memory=True)


def _time_pages(recording: Recording, bandwidth: float, tiny: bool) -> None:
    """Paged attention with pipelines of several depths, and contiguous attention."""
    import triton

    from minillm.bench.serve_gpu import paged_and_contiguous
    from minillm.kernels import paged_attention

    n, length = (2, 64) if tiny else (64, 2048)
    both = paged_and_contiguous(recording.device, n, length)
    # 8 key/value heads of 128, in the dtype of `paged_and_contiguous`
    work = 2 * n * length * 8 * 128 * (2 if recording.device.type == "cuda" else 4)
    label = f"paged, {n} sequences of {length}"
    for stages in (5,) if tiny else (3, 5, 7):
        chosen = triton.Config({"BLOCK_S": 64}, num_warps=4, num_stages=stages)
        calls = iter([(f"{stages} stages", both["paged"])])
        with patch.object(paged_attention, "paged_config", lambda *_, c=chosen: c):
            time_calls(recording, calls, label, work, bandwidth, memory=True)
    calls = iter([("contiguous", both["contiguous"])])
    time_calls(recording, calls, label, work, bandwidth, memory=True)


def matrices(recording: Recording, tiny: bool) -> None:
    """Llama-3-8B's matrices times 1 to 64 rows: in PyTorch, and in our own 16, 8 and 4 bits."""
    from minillm.kernels.few_rows import few_rows_linear

    device, dtype = recording.device, _dtype(recording.device)
    _, bandwidth = _bounds(recording, tiny)
    shapes = {
        "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096),
        "down": (4096, 14336), "head": (128256, 4096),
    }  # fmt: skip
    for name, (N, K) in {"tiny": (70, 128)}.items() if tiny else shapes.items():
        n_copies = 1 if tiny else max(1, int(1e9 / (N * K)))  # far more than the L2 cache holds
        forms = _stored_forms(n_copies, N, K, dtype, device)
        for M in (3,) if tiny else (1, 4, 16, 64):
            x = torch.randn(M, K, device=device, dtype=dtype)
            for form, copies in forms.items():
                product = F.linear if form.startswith("PyTorch") else few_rows_linear
                work = sum(t.nbytes for copy in copies for t in copy)
                calls = iter([(form, partial(_each, [partial(product, x, *c) for c in copies]))])
                label = f"{name} ({N} × {K}), {M} rows"
                time_calls(recording, calls, label, work, bandwidth, memory=True)


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
