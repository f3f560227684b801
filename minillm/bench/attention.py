"""Attention forward and backward in FLOP/s, against the measured matmul peak and torch's kernels.

Then one query over a long cache, in bytes per second, against the memory bandwidth.
FLOPs: 4·B·H·N²·D forward, 2.5 times that backward (5 products instead of 2, with recomputation),
half of both if causal. Sizes on a GPU as in Dao 2023: 16k tokens in all, width 2048; on a CPU one
sequence of 8 heads in float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.recording import Recording, dtype_name, kernel_seconds
from minillm.layers.attention import attention
from minillm.measure import Repeats, alternate, matmul_peak, read_bandwidth

Peer = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Case = tuple[int, int, bool]
"""(D, N, causal)"""


def bench(device: torch.device) -> Path:
    """Measure every length and head size; the tables show D = 128, causal."""
    on_gpu = device.type == "cuda"
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (512, 1024, 2048)
    cases = [(D, N, causal) for D in (64, 128) for N in lengths for causal in (False, True)]
    peers, dtype = attention_peers(device), _dtype(device)
    settings = {
        "dtype": dtype_name(dtype),
        "lengths": lengths,
        "d_head": [64, 128],
        "peers": list(peers),
    }
    recording = Recording("attention", device, settings)
    shown = [(128, N, True) for N in ((4096, 16384) if on_gpu else (2048,))]
    measure_attention(recording, peers, cases, shown)
    if on_gpu:
        measure_memory(recording, peers)
    measure_decode_attention(recording, next(iter(peers)))
    return recording.path


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def attention_peers(device: torch.device) -> dict[str, Peer]:
    """Functions of q (B, N, H, D), k, v and causal; ours comes first.

    On a CPU all are backends of this package.
    """
    if device.type != "cuda":
        return {name: partial(_ours, name) for name in ("sdpa", "reference")}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # The backward pass is timed many times on one graph, so it must not overwrite its inputs.
    torch._functorch.config.donated_buffer = False
    compiled, masks = torch.compile(flex_attention, dynamic=False), {}

    def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        n = q.shape[1]
        if causal and n not in masks:
            masks[n] = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads, block_mask=masks[n] if causal else None).transpose(1, 2)

    def sdpa(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)

    return {
        "triton": partial(_ours, "triton"),
        "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "math": partial(sdpa, SDPBackend.MATH),
        "flex": flex,
    }


def _ours(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attention(q, k, v, causal=causal, backend=backend)


def measure_attention(
    recording: Recording,
    peers: dict[str, Peer],
    cases: Sequence[Case],
    shown: Sequence[Case],
    *,
    repeats: int = 5,
) -> None:
    """Speeds of all peers, recorded case by case; two rows for each case in `shown`."""
    device = recording.device
    peak = [matmul_peak(device, _dtype(device)) for _ in range(7)]
    recording.add(None, {"peak": peak})
    torch.manual_seed(0)
    for case in cases:
        D, N, causal = case
        # FlexAttention is compiled for each case, which is slow: only for the cases shown.
        asked = {n: peer for n, peer in peers.items() if n != "flex" or case in shown}
        times = case_seconds(recording, asked, case, repeats)
        label = f"D {D}, N {N}, {'causal' if causal else 'full'}"
        recording.add(None, {f"{label}: {name}": values for name, values in times.items()})
        B, H = _batch(device, case)
        flops = 4 * B * H * D * N**2 * (0.5 if causal else 1)
        speeds = {
            name: flops * (2.5 if name.startswith("backward") else 1) / median(values)
            for name, values in times.items()
        }
        in_words = ", ".join(f"{name} {speed / 1e9:,.0f}" for name, speed in speeds.items())
        print(f"{label}: {in_words} GFLOP/s")
        for phase in ("forward", "backward") if case in shown else ():
            _add_row(recording, phase, case, speeds, median(peak))


def _batch(device: torch.device, case: Case) -> tuple[int, int]:
    """(B, H) of a case."""
    D, N, _ = case
    return (16384 // N, 2048 // D) if device.type == "cuda" else (1, 8)


def _add_row(
    recording: Recording, phase: str, case: Case, speeds: dict[str, float], peak: float
) -> None:
    D, N, _ = case
    ours, *others = (name for name in speeds if name.startswith(phase))
    mine = speeds[ours]
    backend, dtype = ours.removeprefix(f"{phase} "), dtype_name(_dtype(recording.device))
    row = {
        "what": f"attention {phase} ({backend}), {N} tokens, causal, D {D}, {dtype}",
        "value": mine / 1e9,
        "unit": "GFLOP/s",
        "of_bound": mine / peak,
        "against": {name.removeprefix(f"{phase} "): mine / speeds[name] for name in others},
    }
    recording.add(row, {})


def case_seconds(recording: Recording, peers: dict[str, Peer], case: Case, repeats: int) -> Repeats:
    """Seconds of every peer, forward and backward; a peer that fails is a gap."""
    device, (D, N, causal) = recording.device, case
    torch.compiler.reset()  # or a new case may exceed torch's limit of recompilations
    B, H = _batch(device, case)
    q, k, v = (
        torch.randn(B, N, H, D, device=device, dtype=_dtype(device), requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn_like(q)

    def forward(peer: Peer) -> float:
        with torch.no_grad():
            return kernel_seconds(lambda: peer(q, k, v, causal), device)

    def backward(peer: Peer) -> float:
        # A new graph each time, so that only one peer's saved tensors are in memory.
        out = peer(q, k, v, causal)
        gradient = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        return kernel_seconds(gradient, device)

    fns: dict[str, Callable[[], float]] = {}
    for name, peer in peers.items():
        try:
            torch.autograd.grad(peer(q, k, v, causal), (q, k, v), grad)
        except Exception as error:  # another library's, or out of memory
            recording.gap(f"{name} at D {D}, N {N}", str(error).partition("\n")[0] or repr(error))
            continue
        fns[f"forward {name}"] = partial(forward, peer)
        fns[f"backward {name}"] = partial(backward, peer)
    return alternate(fns, repeats)


def measure_memory(recording: Recording, peers: dict[str, Peer]) -> None:
    """One row: peak bytes of a forward and backward pass over 4096 tokens, besides its inputs.

    16 heads of 128, on a GPU.
    """
    device = recording.device
    q, k, v = (
        torch.randn(1, 4096, 16, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    taken: Repeats = {}
    for name in ("triton", "math"):
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)  # the inputs and earlier leftovers
            out = peers[name](q, k, v, True)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            peak = torch.cuda.max_memory_allocated(device)
            taken.setdefault(f"peak bytes {name}", []).append(peak - before)
    mine, plain = (median(values) for values in taken.values())
    print(f"peak memory: {mine / 1e6:.0f} MB, math {plain / 1e6:.0f} MB")
    row = {
        "what": "attention's memory, 4096 tokens, forward and backward (triton)",
        "value": mine / 1e6,
        "unit": "MB",
        "against": {"less than math": plain / mine},
    }
    recording.add(row, taken)


def measure_decode_attention(
    recording: Recording,
    backend: str,
    *,
    length: int = 32768,
    n_caches: int = 8,
    repeats: int = 7,
) -> None:
    """One row: one new token of one sequence attends to `length` cached tokens.

    32 query heads share 8 key/value heads of 128, as in Llama-3-8B.
    """
    device, dtype = recording.device, _dtype(recording.device)
    q = torch.randn(1, 1, 32, 128, device=device, dtype=dtype)
    # Several caches in turn, together larger than the processor's caches, like a model's layers.
    # As in `KVCache`, each head is contiguous.
    shape = (2, 1, 8, length, 128)
    caches = [
        torch.randn(shape, device=device, dtype=dtype).transpose(2, 3) for _ in range(n_caches)
    ]

    @torch.inference_mode()
    def all_layers() -> None:
        for k, v in caches:
            attention(q, k, v, backend=backend)

    bandwidth = [read_bandwidth(device, dtype) for _ in range(5)]
    # As a graph, since a launch takes longer than a few microseconds of work.
    times = [kernel_seconds(all_layers, device, as_graph=True) for _ in range(repeats + 2)][2:]
    speed, bound = sum(c.nbytes for c in caches) / median(times), median(bandwidth)
    print(f"one query over {length} cached tokens: {speed / 1e9:,.1f} GB/s, {speed / bound:.0%}")
    row = {
        "what": f"decode attention ({backend}), {length // 1024}k cached tokens",
        "value": speed / 1e9,
        "unit": "GB/s",
        "of_bound": speed / bound,
    }
    recording.add(row, {"decode": times, "bandwidth": bandwidth})
