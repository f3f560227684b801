"""Many requests through the engine, against its peers; wasted memory, prefixes, overhead.

16 concurrent short requests, against one at a time, transformers' static batch and (on a CPU)
llama.cpp's server. With answers of equal length a static batch wastes nothing, so only the forward
pass is compared. With answers like Azure's, some short and some long, a static batch computes them
all until the longest is done.
The bound is a decode step's bytes, with the weights read once for all 16. A CPU does not reach it:
with 16 rows a matrix product is no longer bound by memory. `minillm.prepacked`, used here on a CPU,
says more.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minillm.bench.models import default_model
from minillm.bench.peers import (
    LLAMA_CPP,
    has,
    llama_cpp_seconds,
    transformers_static_batch,
    transformers_twin,
)
from minillm.bench.recording import Recording, dtype_name
from minillm.fragmentation import simulate
from minillm.generation import generate
from minillm.measure import Repeats, alternate, multiplies_bfloat16, seconds
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.sampling import Sampling
from minillm.serving.engine import Engine, EngineConfig
from minillm.serving.metrics import SLO, summarize
from minillm.serving.workload import AZURE_OUTPUT, AZURE_PROMPT, azure_load, draw_length, serve

_TOPICS = ("Rome", "salt", "the moon", "a spoon", "rivers", "glass", "an owl", "music")


def bench(device: torch.device) -> Path:
    """Measure the default model, and on a GPU Llama-3-8B's shapes as well."""
    asked = [f"Write {size} story about {t}." for size in ("a short", "a long") for t in _TOPICS]
    model, prompts = default_model(device, asked)
    generator = random.Random(0)
    many = [draw_length(AZURE_OUTPUT, generator, 0.2) for _ in prompts]  # a fifth of Azure's
    answers = {"of one length": [48] * len(prompts), "of many lengths": many}
    lengths = [len(prompt) for prompt in prompts]
    settings = {"model": model.config.name, "prompt_tokens": lengths, "new_tokens": answers}
    recording = Recording("serve", device, settings)
    served = prepack(model) if device.type == "cpu" else model
    forms = {dtype_name(model.dtype): served}
    if device.type == "cpu":
        forms["bfloat16"] = _in_bfloat16(device)
    measure_requests(recording, model, forms, prompts, answers, llama_cpp=device.type == "cpu")
    del forms
    measure_paging_waste(recording)
    measure_prefix(recording, served)
    measure_overhead(recording, served)
    if device.type == "cuda":
        from minillm.bench.serve_gpu import measure_large

        del model, served
        measure_large(recording)
    return recording.path


def _in_bfloat16(device: torch.device) -> Decoder:
    """The default checkpoint in bfloat16, prepacked if the CPU has instructions for it."""
    from minillm.weights.loading import load

    model, _ = load(device=device, dtype="bfloat16")
    return prepack(model) if multiplies_bfloat16(model.device) else model


def measure_requests(
    recording: Recording,
    model: Decoder,
    forms: dict[str, Decoder],
    prompts: list[list[int]],
    answers: dict[str, list[int]],
    *,
    llama_cpp: bool,
    repeats: int = 5,
) -> None:
    """A row for each kind of answers and each of `forms`: the engine's tokens per second.

    forms: the model in the formats that the engine computes in. The first is compared with the same
    requests one at a time and with the peers, one of which runs `model` itself; the others with the
    first, and with llama.cpp. Only tokens that were asked for count.
    """
    device = model.device
    config = EngineConfig(n_blocks=256, max_seqs=16, cuda_graphs=device.type == "cuda")
    engines = {name: Engine(served, config) for name, served in forms.items()}
    twin = transformers_twin(model) if has("transformers", recording, "transformers") else None
    llama_cpp = llama_cpp and has("xllamacpp", recording, LLAMA_CPP)
    for kind, lengths in answers.items():
        calls: dict[str, Callable[[], Any]] = {
            name: partial(_serve_all, engine, prompts, lengths) for name, engine in engines.items()
        }
        first = next(iter(forms.values()))
        calls["one at a time"] = partial(_one_by_one, first, prompts, lengths)
        if twin is not None:
            longest = max(lengths)  # a static batch runs until its longest answer is done
            calls["transformers"] = partial(transformers_static_batch, twin, prompts, longest)
        timed = {name: partial(seconds, call, device) for name, call in calls.items()}
        if llama_cpp:
            threads = torch.get_num_threads()
            timed[LLAMA_CPP] = partial(llama_cpp_seconds, prompts, lengths, threads)
        _add_requests(recording, kind, lengths, list(forms), alternate(timed, repeats))


def _add_requests(
    recording: Recording, kind: str, lengths: list[int], forms: list[str], times: Repeats
) -> None:
    """A row for each of the engine's forms, from the times of all of them and of the peers."""
    first, *more = forms
    took = {name: median(values) for name, values in times.items()}
    what = f"serve {len(lengths)} requests at once, answers {kind}"
    in_words = ", ".join(f"{name} {sum(lengths) / t:,.0f}" for name, t in took.items())
    print(f"{what}: {in_words} tokens/s")
    peers = {first: [name for name in took if name not in forms]}
    peers |= {name: [peer for peer in (first, LLAMA_CPP) if peer in took] for name in more}
    every = {f"{name}, answers {kind}": values for name, values in times.items()}
    for name, others in peers.items():
        row = {
            "what": f"{what}, {name}",
            "value": sum(lengths) / took[name],
            "unit": "tokens/s",
            "against": {other: took[other] / took[name] for other in others},
        }
        recording.add(row, every)


def _serve_all(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> None:
    engine.forget_prefixes()  # a known prompt would be cheaper
    asked = list(zip(prompts, lengths, strict=True))
    ids = [engine.submit(prompt, n) for prompt, n in asked]
    out = engine.run()
    assert [len(out[i].tokens) for i in ids] == lengths


def _one_by_one(model: Decoder, prompts: list[list[int]], lengths: list[int]) -> None:
    for prompt, n in zip(prompts, lengths, strict=True):
        generate(model, prompt, n)


def measure_paging_waste(recording: Recording, *, n_requests: int = 300, repeats: int = 5) -> None:
    """One row: the mean share of empty slots in allocated blocks, in a simulation."""

    def waste(seed: int) -> float:
        generator = random.Random(seed)
        trace = [
            (draw_length(AZURE_PROMPT, generator), draw_length(AZURE_OUTPUT, generator))
            for _ in range(n_requests)
        ]
        samples = simulate(trace, "paged", n_slots=65536, max_len=8192)
        return sum(s.internal for s in samples) / sum(s.internal + s.used for s in samples)

    values = [waste(seed) for seed in range(repeats)]
    what = "empty slots in allocated blocks of 16, Azure-like requests"
    _add_share(recording, what, median(values), {"waste": values})


def measure_prefix(recording: Recording, model: Decoder, n: int = 512, repeats: int = 9) -> None:
    """One row: TTFT of a request with `n` tokens in the prefix cache, over TTFT without them."""
    first, again = [], []
    for seed in range(repeats):
        generator, vocab = random.Random(seed), model.config.vocab_size
        prefix, *ends = ([generator.randrange(vocab) for _ in range(k)] for k in (n, 16, 16))
        engine = Engine(model, EngineConfig(n_blocks=n // 8 + 16, max_batch_tokens=2 * n))
        for end, into in zip(ends, (first, again), strict=True):
            request = engine.submit(prefix + end, 1)
            into.append(engine.run()[request].ttft)
    ratio = median(b / a for a, b in zip(first, again, strict=True))
    what = f"TTFT with a known prefix of {n} tokens, of the first time's"
    _add_share(recording, what, ratio, {"first": first, "again": again})


def measure_overhead(
    recording: Recording, model: Decoder, n: int = 64, n_new: int = 16, repeats: int = 5
) -> None:
    """Two rows: the share of the steps' time outside the model, for greedy and sampled tokens.

    It goes to scheduling, block tables, the batch's tensors, drawing tokens and statistics. n
    requests decode.
    """
    kinds = {"": None, ", sampled (top-k 40)": Sampling(0.8, top_k=40, seed=0)}
    for kind, sampling in kinds.items():
        shares = [_overhead(model, n, n_new, sampling) for _ in range(repeats)]
        what = f"time of a step outside the model, {n} running{kind}"
        _add_share(recording, what, median(shares), {f"overhead{kind}": shares})


def _overhead(model: Decoder, n: int, n_new: int, sampling: Sampling | None) -> float:
    engine = Engine(model, EngineConfig(n_blocks=8 * n, max_seqs=n))
    for i in range(n):
        engine.submit([1 + i % (model.config.vocab_size - 1)] * 8, n_new, sampling=sampling)
    inside = 0.0

    def timed(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            nonlocal inside
            results: list[Tensor] = []
            inside += seconds(lambda: results.append(part(*arguments)), model.device)
            return results[0]

        return call

    # A stand-in with all that the engine uses of the model.
    engine.model = SimpleNamespace(
        hidden=timed(model.hidden), head=timed(model.head), device=model.device
    )
    start = time.perf_counter()
    engine.run()
    return 1 - inside / (time.perf_counter() - start)


def _add_share(
    recording: Recording, what: str, share: float, repeats: dict[str, list[float]]
) -> None:
    print(f"{what}: {100 * share:.2f}%")
    recording.add({"what": what, "value": 100 * share, "unit": "%"}, repeats)


def load_test(device: torch.device, rate: float, n_requests: int, seed: int = 0) -> None:
    """Serve `n_requests` at `rate` a second and print the latencies that users see.

    Lengths are like Azure's, scaled to a tenth.
    """
    model, _ = default_model(device, [])
    engine = Engine(model, EngineConfig(n_blocks=1024, max_seqs=32, max_batch_tokens=256))
    load_ = azure_load(rate, n_requests, model.config.vocab_size, scale=0.1, seed=seed)
    print(summarize(serve(engine, load_), SLO(ttft=1.0, tpot=0.2)))
