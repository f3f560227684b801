"""Parts of `minillm.bench.gpu` that time the attention of prompts: every configuration, by name.

Bound: the FLOPs of causal attention over the peak of matrix products.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.bench.attention import attention_peers
from minillm.bench.gpu import report
from minillm.bench.recording import Recording, seconds_in_turn
from minillm.layers.attention import attention
from minillm.measure import matmul_peak, read_bandwidth

Calls = dict[str, Callable[[], Any]]
"""What is timed in turn, by name."""


def kernel_dtype(device: torch.device) -> torch.dtype:
    """16 bits: bfloat16, which the interpreter on a CPU cannot multiply."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def bounds(recording: Recording, tiny: bool) -> tuple[float, float]:
    """FLOP/s and bytes/s; with `tiny`, which only tests the code, unreachable numbers."""
    if tiny:
        return 1e18, 1e18
    device = recording.device
    return matmul_peak(device, kernel_dtype(device)), read_bandwidth(device, kernel_dtype(device))


def time_calls(
    recording: Recording, calls: Calls, label: str, work: float | dict[str, float], bound: float,
    *, memory: bool = False,
) -> None:  # fmt: skip
    """A row for each call: its work per second against `bound`. A call that fails is a gap.

    Each is timed twice (`seconds_in_turn`); the shorter time counts, and both are in the row.
    work: FLOPs; with `memory`, bytes, of kernels so short that they are timed as a graph. One
    number for all calls, or one for each.
    """
    scale, unit = (1e9, "GB/s") if memory else (1e12, "TFLOP/s")
    times, failed = seconds_in_turn(calls, recording.device, as_graph=memory)
    for name, why in failed.items():
        recording.gap(f"{label}, {name}", why)
    for name, took in times.items():
        speed = (work[name] if isinstance(work, dict) else work) / min(took)
        share = {"of_bound": speed / bound, "seconds": took}
        report(recording, f"{label}, {name}", speed / scale, unit, **share)


def _config_name(config: Any) -> str:
    kwargs = config.kwargs
    kind = " specialized" if kwargs.get("SPECIALIZED") else ""
    loads = ", pointers" if kwargs.get("DESCRIPTORS") is False else ""
    tile = f"{kwargs['BLOCK_T']} × {kwargs['BLOCK_S']}"
    return f"{tile}, {config.num_warps} warps, {config.num_stages} stages{kind}{loads}"


# Earlier defaults, so that one run compares them with today's: BLOCK_T, BLOCK_S, warps, stages.
_BEFORE = {
    ("forward", 256): [(128, 64, 8, 2)],
    ("dkv", 64): [(32, 128, 8, 2), (64, 128, 8, 2)],
    ("dkv", 128): [(32, 64, 8, 2), (32, 128, 8, 2), (16, 128, 8, 2)],
    ("dkv", 256): [(64, 32, 8, 2)],
    ("dq", 64): [(64, 64, 4, 3), (128, 64, 8, 2)],
    ("dq", 128): [(64, 64, 8, 2), (64, 64, 4, 3), (128, 64, 8, 2)],
    ("dq", 256): [(32, 32, 4, 2)],
}


def _before(kind: str, D: int) -> list[Any]:
    """Those of one kernel as Triton's configurations."""
    import triton

    switch = {"SPECIALIZED": False} if kind == "forward" else {}
    return [
        triton.Config({"BLOCK_T": t, "BLOCK_S": s} | switch, warps, stages)
        for t, s, warps, stages in _BEFORE.get((kind, D), ())
    ]


def forward(recording: Recording, tiny: bool) -> None:
    """Every configuration of the forward kernel, its errors, and PyTorch's kernels beside it."""
    from minillm.kernels.flash_forward import flash_forward
    from minillm.kernels.tuning import by_pointers, forward_configs

    device, dtype = recording.device, kernel_dtype(recording.device)
    peak, _ = bounds(recording, tiny)
    for D in (128, 64):
        q, k, v = torch.randn(3, 1, 64 if tiny else 1024, 2, D, device=device, dtype=dtype)
        # The reference in float64, on fewer tokens than the timed cases: it stores all scores.
        exact = attention(*(x.double() for x in (q, k, v)), backend="reference")
        for name, backend in (("ours", "triton"), ("PyTorch's", "sdpa")):
            error = (attention(q, k, v, backend=backend).double() - exact).abs().max()
            report(recording, f"largest error, D {D}, {name}", float(error), "")
    for D, N, q, k, v, flops in _prompts(recording, tiny):
        run = partial(flash_forward, q, k, v, True, D**-0.5)
        calls: Calls = {}
        for config in [*forward_configs(D, dtype), *([] if tiny else _before("forward", D))]:
            for one in (config, by_pointers(config)):
                calls[_config_name(one)] = partial(run, one)
        if device.type == "cuda":
            peers = attention_peers(device)
            for peer in ("flash", "cudnn"):
                calls[peer] = partial(peers[peer], q, k, v, True)
        time_calls(recording, calls, f"forward, D {D}, N {N}", flops, peak)


def specialized(recording: Recording, tiny: bool) -> None:
    """Warp specialization: none of these has run anywhere, so they come late and alone."""
    from minillm.kernels.flash_forward import flash_forward
    from minillm.kernels.tuning import specialized_configs

    peak, _ = bounds(recording, tiny)
    for D, N, q, k, v, flops in _prompts(recording, tiny):
        run = partial(flash_forward, q, k, v, True, D**-0.5)
        calls = {_config_name(c): partial(run, c) for c in specialized_configs(D)}
        time_calls(recording, calls, f"forward, D {D}, N {N}", flops, peak)


def _prompts(
    recording: Recording, tiny: bool
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, float]]:
    """D, N, q, k, v and the FLOPs of causal attention, for each case; the most usual first."""
    device, dtype = recording.device, kernel_dtype(recording.device)
    cases = ((128, 16384), (128, 4096), (64, 16384), (64, 4096), (256, 4096))
    for D, N in ((128, 64), (64, 64)) if tiny else cases:
        B, H = (1, 1) if tiny else (16384 // N, 2048 // D)
        q, k, v = torch.randn(3, B, N, H, D, device=device, dtype=dtype)
        yield D, N, q, k, v, 4 * B * H * N**2 * D / 2


def backward(recording: Recording, tiny: bool) -> None:
    """Every configuration of the two backward kernels: dK and dV, and dQ."""
    from minillm.kernels import flash_backward as kernel
    from minillm.kernels.flash_forward import flash_forward
    from minillm.kernels.tuning import dkv_configs, dq_configs

    dtype = kernel_dtype(recording.device)
    peak, _ = bounds(recording, tiny)
    kinds = {"dkv": (kernel.grad_kv, dkv_configs), "dq": (kernel.grad_q, dq_configs)}
    for D, N, q, k, v, flops in _prompts(recording, tiny):
        scale, grad = D**-0.5, torch.randn_like(q)
        out, lse = flash_forward(q, k, v, True, scale)
        delta = kernel.row_sums(grad, out, lse)
        for kind, (run, choose) in kinds.items():
            configs = [*choose(D, dtype), *([] if tiny else _before(kind, D))]
            call = partial(run, grad, q, k, v, lse, delta, True, scale)
            calls = {_config_name(config): partial(call, config) for config in configs}
            # The forward pass has 2 products; dK and dV take 4, dQ takes 3.
            work = flops * (2 if kind == "dkv" else 1.5)
            time_calls(recording, calls, f"{kind}, D {D}, N {N}", work, peak)
