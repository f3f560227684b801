"""The benchmarks: `python -m minillm bench NAME`, or `python -m minillm.bench NAME`.

Each states its bound first (bytes over measured bandwidth, or FLOPs over measured peak), then times this package and
its peer alternately in one run, and writes every repeat with hardware, versions and date to
`figures/data/NAME.HARDWARE.json`. The README's results table is generated from those files. Medians; ratios before
absolute times, because machines are noisy.
"""

import argparse
import datetime
import json
import math
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import costs
from minillm.attention import attention
from minillm.config import ModelConfig
from minillm.engine import Engine, EngineConfig
from minillm.fragmentation import simulate
from minillm.generate import generate
from minillm.hardware import Hardware, cpu_name, matmul_peak, read_bandwidth, seconds
from minillm.kv_cache import KVCache
from minillm.metrics import AZURE_OUTPUT, AZURE_PROMPT, Load, Objective, azure_load, draw_length, serve, summarize
from minillm.model import Decoder
from minillm.paged import AttentionPlan
from minillm.plots import data_folder, project_folder
from minillm.prepack import prepack
from minillm.weights import device_and_dtype, fetch_default, load, parameter_sources

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def hardware_label(device: torch.device) -> str:
    """Short name for file names and tables: "nvidia-h200", or "cpu-2-threads"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()} threads"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def record(name: str, device: torch.device, settings: dict[str, Any], rows: list[dict[str, Any]], repeats: dict[str, list[float]]) -> Path:
    """Write one benchmark's result; `rows` are what the README shows, `repeats` all raw numbers behind them."""
    label = hardware_label(device)
    packages = ["torch", "triton", "numpy", "transformers", "xllamacpp"]
    document = {
        "name": name,
        "hardware": {"label": label, "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()},
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "date": datetime.date.today().isoformat(),
        "settings": settings,
        "rows": rows,
        "repeats": repeats,
    }
    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{label}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def alternate(fns: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each function twice to warm up, then `repeats` times in turn, every other round in the opposite order, so
    that nobody always runs first. Each function returns its own measurement."""
    results: dict[str, list[float]] = {name: [] for name in fns}
    for i in range(repeats + 2):
        for name in list(fns) if i % 2 else reversed(fns):
            results[name].append(fns[name]())
    return {name: values[2:] for name, values in results.items()}


def transformers_twin(model: Decoder) -> "LlamaForCausalLM":
    """The same weights in Hugging Face transformers' Llama: the peer of the benchmarks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.d_head, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_seq_len, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
    )  # fmt: skip
    with torch.device(model.device):
        twin = LlamaForCausalLM(config).to(model.dtype).eval()
    theirs, ours = dict(twin.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        for name, parts in parameter_sources(c).items():
            for part, rows in zip(parts, ours[name].split([shape[0] for shape in parts.values()]), strict=True):
                theirs[part].copy_(rows)
    return twin


# decode


def decode_seconds(generate_n: Callable[[int], Any], n: int, device: torch.device) -> float:
    """Seconds per decoded token: a run of n + 1 new tokens minus a run of one, so that prefill cancels."""
    return (seconds(lambda: generate_n(n + 1), device) - seconds(lambda: generate_n(1), device)) / n


def bench_decode(device: torch.device) -> list[Path]:
    """Greedy cached decoding, batch 1, against the time to read all weights, and against transformers' generate.

    Where the time goes on two CPU threads, SmolLM2-135M in float32 (a bound of 16.4 ms, 26 ms measured): the matrix
    products alone take 19.7 ms, because each of the 121 pays a start-up; the rest is the dozen small operations
    between two products. The same operations take 3.2 ms when no product is run: the weights sweep the caches, and
    Python and PyTorch are fetched from memory anew after each. Tried without gain: weights in huge pages (0%),
    oneDNN's and MKL's packed weights (slower, equal), torch.compile around the small operations (8% slower). Gained:
    one product for q, k, v and one for gate, up; rotary positions as two fused operations; no mask and no expanded
    heads for one token; one module a layer. Stored transposed, the weights are read 3% faster; not worth the puzzle.
    """
    model, tokenizer = load(device=device)
    prompt = tokenizer.encode("The three laws of robotics are")
    settings = {"model": model.config.name, "prompt_tokens": len(prompt), "new_tokens": 64}
    rows, repeats = _decode(model, prompt, 64, device, peer=True)
    if device.type == "cuda":
        del model
        more_rows, more_repeats = _decode(_llama_3_8b(device), prompt, 64, device, peer=False)
        rows += more_rows
        repeats |= {f"llama-3-8b {name}": values for name, values in more_repeats.items()}
    return [record("decode", device, settings, rows, repeats)]


def _llama_3_8b(device: torch.device) -> Decoder:
    """Its shapes with random weights in bfloat16: speed does not depend on what they say."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Decoder(ModelConfig.preset("llama-3-8b")).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    return model


def _decode(
    model: Decoder, prompt: list[int], n: int, device: torch.device, peer: bool
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    dtype = str(model.dtype).removeprefix("torch.")
    moved = costs.decode_bytes(model.config, 1, len(prompt) + n // 2, dtype)
    fns = {"minillm": lambda: decode_seconds(lambda k: generate(model, prompt, k), n, device)}
    if peer:
        twin, ids = transformers_twin(model), torch.tensor([prompt], device=device)
        fns["transformers"] = lambda: decode_seconds(
            lambda k: twin.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=k, min_new_tokens=k, do_sample=False, pad_token_id=0
            ),
            n,
            device,
        )
    repeats = {"bandwidth": [read_bandwidth(device, model.dtype) for _ in range(7)]} | alternate(fns, 7)
    ours, bound = median(repeats["minillm"]), moved / median(repeats["bandwidth"])
    print(f"decode, {model.config.name}, {dtype}: each token reads {moved / 1e6:.0f} MB")
    print(f"  bound at {median(repeats['bandwidth']) / 1e9:.1f} GB/s: {bound * 1e3:6.2f} ms")
    print(f"  minillm:             {ours * 1e3:6.2f} ms   {bound / ours:.0%} of the bound")
    row = {"what": f"decode, {model.config.name}, {dtype}", "value": 1 / ours, "unit": "tokens/s", "of_bound": bound / ours}
    if peer:
        theirs = median(repeats["transformers"])
        row["against"] = {"transformers": theirs / ours}
        print(f"  transformers:        {theirs * 1e3:6.2f} ms   minillm is {theirs / ours:.2f} times as fast")
    return [row], repeats


# prefill


def bench_prefill(device: torch.device) -> list[Path]:
    """A prompt of 512 tokens in one pass, logits of the last, against FLOPs over the measured matmul peak."""
    n = 512
    model, _ = load(device=device)
    dtype = str(model.dtype).removeprefix("torch.")
    twin = transformers_twin(model)
    tokens = torch.arange(1000, 1000 + n, device=device)[None]
    flops = costs.prefill_flops(model.config, n, last_logits_only=True)

    @torch.inference_mode()
    def ours() -> None:
        model.head(model.hidden(tokens, KVCache(model, 1, n))[:, -1])

    @torch.inference_mode()
    def theirs() -> None:
        twin(tokens, use_cache=True, logits_to_keep=1)

    peaks = [matmul_peak(device, model.dtype) for _ in range(7)]
    fns = {"minillm": lambda: seconds(ours, device), "transformers": lambda: seconds(theirs, device)}
    repeats = {"peak": peaks} | alternate(fns, 15)
    mine, peer = median(repeats["minillm"]), median(repeats["transformers"])
    bound = flops / median(repeats["peak"])
    print(f"prefill, {model.config.name}, {dtype}: {n} tokens, {flops / 1e9:.0f} GFLOP")
    print(f"  bound at {median(repeats['peak']) / 1e9:.0f} GFLOP/s: {n / bound:7.0f} tokens/s")
    print(f"  minillm:               {n / mine:7.0f} tokens/s   {bound / mine:.0%} of the bound")
    print(f"  transformers:          {n / peer:7.0f} tokens/s   minillm is {peer / mine:.2f} times as fast")
    row = {
        "what": f"prefill of {n} tokens, {model.config.name}, {dtype}",
        "value": n / mine,
        "unit": "tokens/s",
        "of_bound": bound / mine,
        "against": {"transformers": peer / mine},
    }
    return [record("prefill", device, {"model": model.config.name, "prompt_tokens": n, "flops": flops}, [row], repeats)]


# attention


def _attention_peers(device: torch.device) -> dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]]:
    """Functions of q (B, N, H, D), k, v and causal, ours first. On a CPU all are backends of this package."""
    if device.type != "cuda":
        return {name: lambda q, k, v, c, name=name: attention(q, k, v, causal=c, backend=name) for name in ("sdpa", "reference")}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention, dynamic=False), {}

    def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        n = q.shape[1]
        if causal and n not in masks:
            masks[n] = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=masks[n] if causal else None).transpose(1, 2)

    def sdpa(kind: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            with sdpa_kernel(kind):
                out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
            return out.transpose(1, 2)

        return run

    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    ours = {"triton": lambda q, k, v, c: attention(q, k, v, causal=c, backend="triton")}
    return ours | {name: sdpa(kind) for name, kind in kinds.items()} | {"flex": flex}


def _kernel_seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Of one call. GPU kernels are timed by Triton's own benchmark: events on the device, caches flushed between calls."""
    if device.type != "cuda":
        return seconds(fn, device)
    from triton.testing import do_bench

    return do_bench(fn, warmup=5, rep=30, return_mode="median") / 1e3


def _attention_case(
    peers: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]], case: tuple[int, int, bool], device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every peer, forward and backward, for (D, N, causal); a peer that runs out of memory is left out."""
    D, N, causal = case
    B, H = (16384 // N, 2048 // D) if device.type == "cuda" else (1, 8)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(B, N, H, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad, fns = torch.randn_like(q), {}
    for name, peer in peers.items():
        try:
            out = peer(q, k, v, causal)
            torch.autograd.grad(out, (q, k, v), grad)
        except torch.OutOfMemoryError:
            print(f"    {name}: out of memory at N = {N}")
            continue

        @torch.no_grad()
        def forward(peer: Any = peer) -> None:
            peer(q, k, v, causal)

        def backward(out: Tensor) -> None:
            torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        fns[f"forward {name}"] = lambda forward=forward: _kernel_seconds(forward, device)
        # The graph is made anew for each measurement, so that not all peers' saved tensors are kept at once.
        fns[f"backward {name}"] = lambda peer=peer, backward=backward: _kernel_seconds(partial(backward, peer(q, k, v, causal)), device)
    return alternate(fns, 5)


def bench_attention(device: torch.device) -> list[Path]:
    """Attention forward and backward in FLOP/s against the measured matmul peak, against torch's kernels in the same run;
    then one query over a long cache, in bytes per second against the measured copy bandwidth.

    FLOPs: 4·B·H·N²·D forward, 2.5 times that backward (5 products for 2, recomputation included), half if causal.
    Sizes as in Dao 2023: 16k tokens in all, width 2048, on a GPU; one sequence of 8 heads in float32 on a CPU.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (512, 1024, 2048)
    cases = [(D, N, causal) for D in (64, 128) for N in lengths for causal in (False, True)]
    peers = _attention_peers(device)
    ours, shown = next(iter(peers)), (4096, 16384) if on_gpu else (2048,)
    peaks = [matmul_peak(device, dtype) for _ in range(7)]
    repeats, rows = {"peak": peaks}, []
    torch.manual_seed(0)
    for D, N, causal in cases:
        times = _attention_case(peers, (D, N, causal), device)
        label = f"D {D}, N {N}, {'causal' if causal else 'full'}"
        repeats |= {f"{label}: {name}": values for name, values in times.items()}
        flops = 4 * (2048 * 16384 if on_gpu else 8 * D * N) * N * (0.5 if causal else 1)
        speeds = {name: flops * (2.5 if name.startswith("backward") else 1) / median(values) for name, values in times.items()}
        print(f"{label}: " + ", ".join(f"{name} {speed / 1e9:,.0f}" for name, speed in speeds.items()) + " GFLOP/s")
        if D == 128 and causal and N in shown:
            for phase in ("forward", "backward"):
                mine = speeds.pop(f"{phase} {ours}")
                against = {name.removeprefix(f"{phase} "): mine / speed for name, speed in speeds.items() if name.startswith(phase)}
                what = f"attention {phase} ({ours}), {N} tokens, causal, D {D}, {str(dtype).removeprefix('torch.')}"
                rows.append({"what": what, "value": mine / 1e9, "unit": "GFLOP/s", "of_bound": mine / median(peaks), "against": against})
    if on_gpu:
        more_rows, peak_bytes = _attention_memory(peers, device)
        rows, repeats = rows + more_rows, repeats | peak_bytes
    more_rows, more_repeats = _decode_attention(device, dtype, ours)
    settings = {"dtype": str(dtype).removeprefix("torch."), "lengths": lengths, "d_head": [64, 128], "peers": list(peers)}
    return [record("attention", device, settings, rows + more_rows, repeats | more_repeats)]


def _attention_memory(
    peers: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]], device: torch.device
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Peak bytes that a forward and backward pass over 4096 tokens (16 heads of 128) take beside its inputs."""
    q, k, v = (torch.randn(1, 4096, 16, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    taken: dict[str, list[float]] = {}
    for name in ("triton", "math"):
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            out = peers[name](q, k, v, True)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            taken.setdefault(f"peak bytes {name}", []).append(torch.cuda.max_memory_allocated(device) - before)
    mine, plain = (median(values) for values in taken.values())
    row = {"what": "attention's memory, 4096 tokens, forward and backward (triton)", "value": mine / 1e6, "unit": "MB"}
    print(f"peak memory: {mine / 1e6:.0f} MB, math {plain / 1e6:.0f} MB")
    return [row | {"against": {"less than math": plain / mine}}], taken


def _decode_attention(device: torch.device, dtype: torch.dtype, backend: str) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """One new token of one sequence looks at 32k cached ones: 32 query heads on 8 of 128 dimensions (Llama-3-8B)."""
    q = torch.randn(1, 1, 32, 128, device=device, dtype=dtype)
    # Several caches in turn, together larger than the processor's own caches, as the layers of a model are.
    caches = [torch.randn(2, 1, 32768, 8, 128, device=device, dtype=dtype) for _ in range(8)]

    @torch.inference_mode()
    def all_layers() -> None:
        for k, v in caches:
            attention(q, k, v, backend=backend)

    bandwidth = [Hardware.measure(device).copy_bandwidth for _ in range(5)]
    times = [_kernel_seconds(all_layers, device) for _ in range(9)][2:]
    speed, bound = sum(c.nbytes for c in caches) / median(times), median(bandwidth)
    print(f"one query over 32768 cached tokens: {speed / 1e9:,.1f} GB/s, {speed / bound:.0%} of the copy bandwidth")
    row = {"what": f"decode attention ({backend}), 32k cached tokens", "value": speed / 1e9, "unit": "GB/s", "of_bound": speed / bound}
    return [row], {"decode": times, "copy bandwidth": bandwidth}


# serving


def bench_serve(device: torch.device) -> list[Path]:
    """16 concurrent short requests through the engine, against one at a time, transformers' static batch and (on a CPU)
    llama.cpp's server; the waste of paging; a prefix met a second time; and the scheduler's own time.

    The bound of the first is a decode step's bytes, weights once for all 16. A CPU does not reach it: with 16 rows a matrix
    product is no longer bound by memory; `minillm.prepack`, used here on a CPU, says how far it is and what was tried.
    With answers of one length a static batch wastes nothing, and what is compared is the forward pass alone. With answers
    like Azure's, some short and some long, a static batch computes them all until the longest is done.
    """
    model, tokenizer = load(device=device)
    topics = ["Rome", "salt", "the moon", "a spoon", "rivers", "glass", "an owl", "music"]
    prompts = [tokenizer.encode(f"Write {size} story about {topic}.") for size in ("a short", "a long") for topic in topics]
    generator = random.Random(0)
    answers = {"of one length": [48] * 16, "of many lengths": [draw_length(AZURE_OUTPUT, generator, 0.2) for _ in prompts]}
    served, twin = prepack(model) if device.type == "cpu" else model, transformers_twin(model)
    rows, repeats = [], {}
    for kind, lengths in answers.items():
        row, more_repeats = _sixteen_requests(model, served, twin, prompts, lengths, kind)
        rows.append(row)
        repeats |= more_repeats

    n_printed = len(rows)
    repeats["waste"] = [_paging_waste(seed) for seed in range(5)]
    rows.append(
        {"what": "empty slots in allocated blocks of 16, Azure-like requests", "value": 100 * median(repeats["waste"]), "unit": "%"}
    )

    first, again = zip(*(_prefix_ttft(served, seed) for seed in range(9)), strict=True)
    repeats |= {"first": list(first), "again": list(again)}
    ratio = median(b / a for a, b in zip(first, again, strict=True))
    rows.append({"what": "TTFT with a known prefix of 512 tokens, of the first time's", "value": 100 * ratio, "unit": "%"})

    repeats["overhead"] = [_overhead(served) for _ in range(5)]
    rows.append({"what": "time of a step outside the model, 64 running", "value": 100 * median(repeats["overhead"]), "unit": "%"})
    for row in rows[n_printed:]:
        print(f"{row['what']}: {row['value']:.2f}{row['unit']}")
    if device.type == "cuda":
        more_rows, more_repeats = _serve_large(device)
        rows, repeats = rows + more_rows, repeats | more_repeats
    settings = {"model": model.config.name, "prompt_tokens": [len(p) for p in prompts], "new_tokens": answers}
    return [record("serve", device, settings, rows, repeats)]


def _sixteen_requests(
    model: Decoder, served: Decoder, twin: "LlamaForCausalLM", prompts: list[list[int]], lengths: list[int], kind: str
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Tokens per second of the engine (with `served`) and its peers on the same requests; only tokens that were asked for count."""
    fns: dict[str, Callable[[], Any]] = {
        "minillm": partial(_serve_all, served, prompts, lengths),
        "one at a time": lambda: [generate(model, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)],
        "transformers": partial(_static_batch, twin, prompts, lengths, model.device),
    }
    timed = {name: lambda fn=fn: seconds(fn, model.device) for name, fn in fns.items()}
    if model.device.type == "cpu":
        timed["llama.cpp (computes in 4 bit)"] = partial(_llama_cpp_seconds, prompts, lengths, torch.get_num_threads())
    repeats = alternate(timed, 5)
    took = {name: median(values) for name, values in repeats.items()}
    what = f"serve 16 requests at once, answers {kind}, {str(model.dtype).removeprefix('torch.')}"
    print(f"{what}: " + ", ".join(f"{name} {sum(lengths) / t:,.0f}" for name, t in took.items()) + " tokens/s")
    against = {name: t / took["minillm"] for name, t in took.items() if name != "minillm"}
    row = {"what": what, "value": sum(lengths) / took["minillm"], "unit": "tokens/s", "against": against}
    return row, {f"{name}, answers {kind}": values for name, values in repeats.items()}


def _serve_all(model: Decoder, prompts: list[list[int]], lengths: list[int]) -> None:
    engine = Engine(model, EngineConfig(n_blocks=256, max_seqs=16, cuda_graphs=model.device.type == "cuda"))
    for prompt, n in zip(prompts, lengths, strict=True):
        engine.submit(prompt, n)
    assert [len(completion.tokens) for _, completion in sorted(engine.run().items())] == lengths


@torch.inference_mode()
def _static_batch(twin: "LlamaForCausalLM", prompts: list[list[int]], lengths: list[int], device: torch.device) -> None:
    longest, n = max(map(len, prompts)), max(lengths)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = twin.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
    assert out.shape == (len(prompts), longest + n)


def _llama_cpp_seconds(prompts: list[list[int]], lengths: list[int], n_threads: int) -> float:
    """Seconds that llama.cpp's server needs with 8 slots. In a process of its own: its idle threads would slow the others."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_llama_cpp, prompts, lengths, n_threads).result()


def _llama_cpp(prompts: list[list[int]], lengths: list[int], n_threads: int) -> float:
    """The default checkpoint in llama.cpp's server, which multiplies in the file's own 4-bit format; loading not counted."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx, params.verbosity = str(fetch_default()), 8, 8 * 512, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    server = xllamacpp.Server(params)

    def ask(prompt: list[int], n: int) -> int:
        options = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return server.handle_completions(options)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert set(pool.map(ask, prompts, [2] * len(prompts))) == {2}  # warm up
        start = time.perf_counter()
        assert list(pool.map(ask, prompts, lengths)) == lengths
        return time.perf_counter() - start


def _paging_waste(seed: int) -> float:
    """Mean share of empty slots in the blocks handed out, over the steps of a simulation."""
    generator = random.Random(seed)
    trace = [(draw_length(AZURE_PROMPT, generator), draw_length(AZURE_OUTPUT, generator)) for _ in range(300)]
    samples = simulate(trace, "paged", n_slots=65536, max_len=8192)
    return sum(s.internal for s in samples) / sum(s.internal + s.used for s in samples)


def _prefix_ttft(model: Decoder, seed: int) -> tuple[float, float]:
    """Seconds to the first token of two requests with the same 512 tokens and another 16 each."""
    generator = random.Random(seed)
    prefix, *ends = ([generator.randrange(1000, 2000) for _ in range(size)] for size in (512, 16, 16))
    engine = Engine(model, EngineConfig(n_blocks=80, max_batch_tokens=1024))
    ttft = []
    for end in ends:
        request = engine.submit(prefix + end, 1)
        ttft.append(engine.run()[request].ttft)
    return ttft[0], ttft[1]


def _overhead(model: Decoder) -> float:
    """Share of the steps' time that is not spent in the model, with 64 requests decoding: scheduling, block tables, the
    batch's tensors, picking tokens, statistics."""
    engine = Engine(model, EngineConfig(n_blocks=512, max_seqs=64))
    for i in range(64):
        engine.submit([1000 + i] * 8, 16)
    inside = 0.0

    def timed(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            nonlocal inside
            results: list[Tensor] = []
            inside += seconds(lambda: results.append(part(*arguments)), model.device)
            return results[0]

        return call

    engine.model = SimpleNamespace(hidden=timed(model.hidden), head=timed(model.head), device=model.device)
    start = time.perf_counter()
    engine.run()
    return 1 - inside / (time.perf_counter() - start)


def _serve_large(device: torch.device) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Llama-3-8B's shapes on a GPU: one user with CUDA graphs against the bound of the memory; 256 requests at once against
    transformers' continuous batching; and paged against contiguous attention at the same work."""
    large = _llama_3_8b(device)
    alone = Engine(large, EngineConfig(n_blocks=32, max_seqs=1, cuda_graphs=True))

    def tpot() -> float:
        request = alone.submit(list(range(8)), 129)
        return alone.run()[request].tpot

    bandwidth = [read_bandwidth(device, large.dtype) for _ in range(7)]
    repeats = {"8b bandwidth": bandwidth, "8b tpot": [tpot() for _ in range(7)][2:]}
    bound, took = costs.decode_bytes(large.config, 1, 72, "bfloat16") / median(bandwidth), median(repeats["8b tpot"])
    row = {"what": "decode with CUDA graphs, llama-3-8b, bfloat16", "value": 1 / took, "unit": "tokens/s", "of_bound": bound / took}
    rows: list[dict[str, Any]] = [row]

    requests = azure_load(math.inf, 256, large.config.vocab_size, scale=0.25)
    tokens, twin = sum(request.max_new_tokens for request in requests), transformers_twin(large)
    sizes = EngineConfig(n_blocks=8192, max_seqs=256, max_batch_tokens=2048, cuda_graphs=True)
    fns = {
        "256 requests, minillm": lambda: seconds(lambda: serve(Engine(large, sizes), requests), device),
        "256 requests, transformers": lambda: seconds(lambda: _transformers_continuous(twin, requests), device),
    }
    repeats |= alternate(fns, 5)
    ours, theirs = (median(repeats[name]) for name in fns)
    row = {"what": "256 requests at once, llama-3-8b, bfloat16", "value": tokens / ours, "unit": "tokens/s"}
    rows.append(row | {"against": {"transformers' continuous batching": theirs / ours}})

    contiguous, paged = _paged_and_contiguous(device)
    repeats |= alternate({"contiguous": lambda: _kernel_seconds(contiguous, device), "paged": lambda: _kernel_seconds(paged, device)}, 7)
    ratio = median(repeats["contiguous"]) / median(repeats["paged"])
    rows.append({"what": "paged attention, 64 sequences of 2048", "value": ratio, "unit": "× contiguous"})
    for row in rows:
        print(f"{row['what']}: {row['value']:,.2f} {row['unit']}")
    return rows, repeats


def _transformers_continuous(twin: "LlamaForCausalLM", requests: Sequence[Load]) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with twin.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        for request in requests:
            manager.add_request(list(request.prompt_ids), max_new_tokens=request.max_new_tokens)
        finished = 0
        while finished < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped before all requests were done.")
            finished += result is not None and result.is_finished()


def _paged_and_contiguous(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """One new token of each of 64 sequences of 2048, 32 heads on 8 of 128 dimensions: the same numbers, laid out both ways."""
    n, length, size = 64, 2048, 16
    q = torch.randn(n, 1, 32, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, n, length, 8, 128, device=device, dtype=torch.bfloat16)
    order = torch.randperm(n * length // size, device=device)  # blocks lie anywhere
    pages = [torch.empty(order.numel(), size, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for page, x in zip(pages, (k, v), strict=True):
        page[order] = x.reshape(page.shape)
    lens = torch.tensor([[length] * n, [1] * n], dtype=torch.int32, device=device)
    plan = AttentionPlan(order.int().reshape(n, -1), lens, [length] * n, [1] * n, size)
    return lambda: attention(q, k, v), lambda: plan.attend(q[:, 0], *pages, 128**-0.5, "auto")


def load_test(device: torch.device, rate: float, n_requests: int, seed: int = 0) -> None:
    """Serve `n_requests` at `rate` a second, Azure-like lengths scaled to a tenth, and print what their users felt."""
    model, _ = load(device=device)
    engine = Engine(model, EngineConfig(n_blocks=1024, max_seqs=32, max_batch_tokens=256))
    completions = serve(engine, azure_load(rate, n_requests, model.config.vocab_size, scale=0.1, seed=seed))
    print(summarize(completions, Objective(ttft=1.0, tpot=0.2)))


# load

# VmHWM is the process's own peak; getrusage, which exists everywhere, starts from the parent's peak on Linux.
_LOAD_PROBE = """
import pathlib, re, resource, sys, time
import gguf, tiktoken, torch
import minillm, minillm.weights

def peak_bytes():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS

before = peak_bytes()
start = time.perf_counter()
model, _ = minillm.load(device=sys.argv[1])
elapsed = time.perf_counter() - start
print(elapsed, peak_bytes() - before, sum(p.nbytes for p in model.parameters()))
"""


def bench_load(device: torch.device) -> list[Path]:
    """Loading the default checkpoint in a fresh process: seconds, and peak memory over the model's own bytes."""
    default = fetch_default()
    repeats: dict[str, list[float]] = {"seconds": [], "peak_bytes": [], "model_bytes": []}
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", _LOAD_PROBE, str(device)], capture_output=True, text=True, check=True).stdout
        for key, value in zip(repeats, map(float, out.split()), strict=True):
            repeats[key].append(value)
    took = median(repeats["seconds"])
    rows: list[dict[str, Any]] = [{"what": "load the default checkpoint", "value": took, "unit": "s"}]
    print(f"load: {took:.2f} s")
    if device.type == "cpu":  # on a GPU the model is not in the memory that is counted here
        peak, model_bytes = median(repeats["peak_bytes"]), median(repeats["model_bytes"])
        rows.append({"what": "peak memory while loading, over the model's bytes", "value": peak / model_bytes, "unit": "×"})
        print(f"  peak memory {peak / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB: {peak / model_bytes:.2f} times")
    return [record("load", device, {"model": default.stem}, rows, repeats)]


BENCHMARKS: dict[str, Callable[[torch.device], list[Path]]] = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "attention": bench_attention,
    "serve": bench_serve,
    "load": bench_load,
}


# The README's tables


def results_table(folder: Path) -> str:
    """The results as a Markdown table, from the JSON files of `record`; a benchmark without a GPU file is named as such."""
    lines = ["| benchmark | hardware | result | of the bound | as fast as |", "| --- | --- | --- | --- | --- |"]
    for name in BENCHMARKS:
        on_gpu = False
        for path in sorted(folder.glob(f"{name}.*.json")):
            document = json.loads(path.read_text())
            label = document["hardware"]["label"]
            on_gpu |= not label.startswith("cpu")
            for row in document["rows"]:
                share = f"{row['of_bound']:.0%}" if "of_bound" in row else "–"
                ratio = ", ".join(f"{ratio:.2f} × {peer}" for peer, ratio in row.get("against", {}).items()) or "–"
                value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
                lines.append(f"| {row['what']} | {label} | {value} {row['unit']} | {share} | {ratio} |")
        if not on_gpu:
            lines.append(f"| {name} | any GPU | not measured yet | – | – |")
    return "\n".join(lines)


_MARKERS = ("<!-- results, written by python -m minillm.bench --readme -->", "<!-- end of results -->")


def update_readme(readme: Path) -> None:
    """Put the current `results_table` between the README's two markers."""
    before, rest = readme.read_text(encoding="utf-8").split(_MARKERS[0])
    after = rest.split(_MARKERS[1])[1]
    readme.write_text(f"{before}{_MARKERS[0]}\n{results_table(data_folder())}\n{_MARKERS[1]}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks named on the command line, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m minillm.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all if none is named")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rate", type=float, help="with serve: send requests at this rate a second, and print what users felt")
    parser.add_argument("--requests", type=int, default=64, help="with --rate: how many")
    parser.add_argument("--readme", action="store_true", help="measure nothing, only rewrite the README's results table")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in BENCHMARKS:
            raise ValueError(f"There is no benchmark {name!r}; choose from {', '.join(BENCHMARKS)}.")
    if options.readme:
        update_readme(project_folder() / "README.md")
        return 0
    device, _ = device_and_dtype(options.device, "auto")
    if options.rate is not None:
        if options.names != ["serve"] or options.requests < 1:
            raise ValueError("--rate goes with the benchmark serve and at least one request: bench serve --rate 2 --requests 64.")
        load_test(device, options.rate, options.requests)
        return 0
    for name in options.names or BENCHMARKS:
        for path in BENCHMARKS[name](device):
            print(f"  written to {path}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"minillm: {error}")
