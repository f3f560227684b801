"""Parts of `minillm.bench.gpu` that run a whole model: Llama-3-8B's shapes with random weights.

Bound of a decoded token: the bytes of all weights and of the cache so far, over the bandwidth.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from minillm import costs
from minillm.bench.gpu import report
from minillm.bench.models import random_model
from minillm.bench.recording import Recording, dtype_name
from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.measure import device_seconds, read_bandwidth, seconds
from minillm.model import Decoder
from minillm.serving.cuda_graphs import GraphedSequence
from minillm.serving.engine import Engine, EngineConfig
from minillm.serving.workload import azure_load, serve

KERNELS = {"plain": False, "fused kernels": None}
"""What `Decoder.fast` is set to, by its name in the results."""


def large_model(recording: Recording, tiny: bool) -> Decoder:
    """A model of Llama-3-8B's shapes, or with `tiny` of one small layer."""
    if not tiny:
        return random_model("llama-3-8b", recording.device)
    config = ModelConfig(
        n_layers=1, d_model=32, n_heads=2, n_kv_heads=1, d_head=16, d_ff=64, vocab_size=300,
        max_seq_len=256,
    )  # fmt: skip
    return Decoder(config).eval().requires_grad_(False).to(recording.device)


def model(recording: Recording, tiny: bool) -> None:
    """One user: eager and as a graph, each with fused kernels and without; a replay by kernel."""
    device, large = recording.device, large_model(recording, tiny)
    n, prompt = (32, [1, 2, 3]) if tiny else (64, list(range(8)))
    bandwidth = 1e18 if tiny else read_bandwidth(device, large.dtype)
    n_bytes = costs.decode_bytes(large.config, 1, len(prompt) + n // 2, dtype_name(large.dtype))
    bound = n_bytes / bandwidth
    report(recording, "bound of a token", bound * 1e3, "ms")

    def token_seconds() -> float:
        """A longer run minus a shorter one, so that the prompt is not counted."""

        def run(k: int) -> float:
            return seconds(lambda: generate(large, prompt, k), device)

        run(2)
        return median((run(n + 1) - run(1)) / n for _ in range(5))

    for name, fused in KERNELS.items():
        large.fast = fused
        took = token_seconds()
        report(recording, f"a token, {name}", took * 1e3, "ms", of_bound=bound / took)
    if device.type == "cuda":
        _graphs(recording, large, prompt, n, bound)
    else:
        recording.gap("graphs", "they need a CUDA device")


def _graphs(recording: Recording, large: Decoder, prompt: list[int], n: int, bound: float) -> None:
    """A token by replaying a CUDA graph; the replay alone; its kernels."""
    graphs = {}
    for name, fused in KERNELS.items():
        large.fast = fused
        graphs[name] = _time_graph(recording, name, large, prompt, n, bound)
    for name, graph in graphs.items():  # at the end: the profiler slows everything after it
        _profile(recording, name, graph)


Graph = tuple[GraphedSequence, torch.cuda.CUDAGraph]
"""A captured step, and the sequence that owns all the memory it reads and writes."""


def _time_graph(
    recording: Recording, name: str, large: Decoder, prompt: list[int], n: int, bound: float
) -> Graph:
    """Two rows: a token with its way to the host, and the replay alone."""
    device = recording.device
    sequence = GraphedSequence(large, len(prompt) + 2 * n)
    sequence(prompt)
    took = median(seconds(lambda: int(sequence([1]).argmax()), device) for _ in range(n))
    report(recording, f"a token, graph, {name}", took * 1e3, "ms", of_bound=bound / took)
    graph = next(iter(sequence._graphs._graphs.values()))[0]
    alone = device_seconds(graph.replay, device)
    report(recording, f"a replay alone, {name}", alone * 1e3, "ms", of_bound=bound / alone)
    return sequence, graph


def _profile(recording: Recording, name: str, graph: Graph) -> None:
    """Microseconds of one replay, by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph[1].replay()
        torch.cuda.synchronize()
    kernels = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)[:25]
    times = {event.key[:120]: [event.self_device_time_total, event.count] for event in kernels}
    recording.add(None, {f"replay by kernel, {name} (µs, calls)": times})
    for kernel, (took, calls) in list(times.items())[:12]:
        print(f"    {took:8.1f} µs in {calls:4} calls  {kernel[:70]}")


def few_bits(recording: Recording, tiny: bool) -> None:
    """One user of the same model in 8 and in 4 bits: as a graph, and a replay by kernel."""
    try:
        from minillm.quantization.quantize import decode_bytes, quantize
    except ModuleNotFoundError as error:  # calibration, which is not needed here, needs more
        recording.gap("int8 and int4", f"{error.name} is not installed")
        return
    device, large = recording.device, large_model(recording, tiny)
    n, prompt = (3, [1, 2, 3]) if tiny else (64, list(range(8)))
    bandwidth = 1e18 if tiny else read_bandwidth(device, large.dtype)
    graphs = {}
    for scheme in ("int8", "int4"):
        small = quantize(large, scheme)
        bound = decode_bytes(small, len(prompt) + n // 2) / bandwidth
        report(recording, f"bound of a token, {scheme}", bound * 1e3, "ms")
        if device.type == "cuda":
            graphs[scheme] = _time_graph(recording, scheme, small, prompt, n, bound)
        else:
            took = seconds(partial(generate, small, prompt, n), device) / n
            report(recording, f"a token, {scheme}", took * 1e3, "ms", of_bound=bound / took)
    for scheme, graph in graphs.items():
        _profile(recording, scheme, graph)


def engine(recording: Recording, tiny: bool) -> None:
    """Many requests: tokens per second, time by part of a step, compilations meanwhile."""
    device, large = recording.device, large_model(recording, tiny)
    config = EngineConfig(
        n_blocks=40 if tiny else 16384, max_seqs=4 if tiny else 256,
        max_batch_tokens=64 if tiny else 2048, cuda_graphs=device.type == "cuda",
    )  # fmt: skip
    start = time.perf_counter()
    running = Engine(large, config)
    report(recording, "making the engine, graphs captured", time.perf_counter() - start, "s")
    n, scale = (3, 0.01) if tiny else (256, 0.25)
    requests = azure_load(math.inf, n, large.config.vocab_size, scale=scale)
    if tiny:
        requests = [r for r in requests if len(r.prompt_ids) + r.max_new_tokens < 200]
    n_tokens = sum(request.max_new_tokens for request in requests)
    compiled = count_compilations()
    for attempt in ("the first time", "again"):  # again: nothing is left to compile
        compiled.clear()
        running.forget_prefixes()
        parts = timed_parts(running)
        took = seconds(lambda: serve(running, requests), device)
        report(recording, f"{n} requests, {attempt}", n_tokens / took, "tokens/s")
        report(recording, f"Triton compilations, {attempt}", len(compiled), "", kernels=compiled[:])
        for part, spent in parts.items():
            report(recording, f"{part}, {attempt}", 100 * spent / took, "% of the time")


def timed_parts(engine: Engine) -> dict[str, float]:
    """Seconds in each part of the engine's steps, summed from now on.

    The forward pass ends when its tokens are read, so it includes the GPU's time.
    """
    import minillm.serving.engine as module

    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        fn = getattr(fn, "untimed", fn)  # an earlier call may have wrapped it

        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*arguments, **keywords)
            finally:
                spent[name] += time.perf_counter() - start

        call.untimed = fn
        return call

    engine.scheduler.schedule = timed("scheduling", engine.scheduler.schedule)
    engine._forward = timed("forward pass", engine._forward)
    module.draw_tokens = timed("drawing tokens", module.draw_tokens)
    if engine._graphs is not None:
        rows = engine._graphs._rows
        rows.fill = timed("filling the graphs' tensors (in the forward pass)", rows.fill)
    return spent


def count_compilations() -> list[str]:
    """A list to which the name of every kernel is added that Triton compiles from now on."""
    import triton

    names: list[str] = []

    def listen(*_: Any, src: Any = None, cache_hit: bool = False, **__: Any) -> None:
        names.append(f"{getattr(src, 'name', '?')}{' (from the cache)' if cache_hit else ''}")

    if hasattr(triton.knobs.compilation, "listener"):
        triton.knobs.compilation.listener = listen
    return names
