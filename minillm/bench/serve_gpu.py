"""Serving Llama-3-8B's shapes on a GPU; part of the benchmark serve. Not run on a GPU yet.

One user with CUDA graphs, against the memory's bound; 256 requests at once, against transformers'
continuous batching; paged against contiguous attention, for the same work.
"""

import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minillm import costs
from minillm.bench.models import random_model
from minillm.bench.peers import has, transformers_continuous, transformers_twin
from minillm.bench.recording import Recording, kernel_seconds
from minillm.layers.attention import attention
from minillm.measure import alternate, read_bandwidth, seconds
from minillm.model import Decoder
from minillm.quantization.kv_cache import storage_for
from minillm.ragged import RaggedLayout
from minillm.serving.engine import Engine, EngineConfig
from minillm.serving.workload import TimedRequest, azure_load, serve


def measure_large(recording: Recording) -> None:
    """Measure all three, in this order."""
    large = random_model("llama-3-8b", recording.device)
    measure_one_user(recording, large, cuda_graphs=True)
    config = EngineConfig(n_blocks=8192, max_seqs=256, max_batch_tokens=2048, cuda_graphs=True)
    measure_many(recording, large, config, n_requests=256)
    measure_layouts(recording)


def measure_one_user(
    recording: Recording, model: Decoder, *, cuda_graphs: bool, n: int = 128, repeats: int = 7
) -> None:
    """One row: tokens per second of one request through the engine, as a share of the bound."""
    device, dtype = model.device, model.dtype
    alone = Engine(model, EngineConfig(n_blocks=32, max_seqs=1, cuda_graphs=cuda_graphs))

    def tpot() -> float:
        request = alone.submit(list(range(8)), n + 1)
        return alone.run()[request].tpot

    bandwidth = [read_bandwidth(device, dtype) for _ in range(repeats)]
    times = [tpot() for _ in range(repeats + 2)][2:]  # the first two warm up
    bound = costs.decode_bytes(model.config, 1, 8 + n // 2, dtype) / median(bandwidth)
    row = {
        "what": f"decode with CUDA graphs, {model.config.name}, bfloat16",
        "value": 1 / median(times),
        "unit": "tokens/s",
        "of_bound": bound / median(times),
    }
    _print(row)
    recording.add(row, {"8b bandwidth": bandwidth, "8b tpot": times})


def measure_many(
    recording: Recording,
    model: Decoder,
    config: EngineConfig,
    n_requests: int,
    *,
    scale: float = 0.25,
    repeats: int = 5,
) -> None:
    """One row: output tokens per second, with all requests sent at once."""
    engine, vocab = Engine(model, config), model.config.vocab_size
    generator = random.Random(0)
    lengths = azure_load(math.inf, n_requests, vocab, scale=scale)
    tokens = sum(request.max_new_tokens for request in lengths)

    def fresh() -> list[TimedRequest]:
        """The same lengths with new prompts, which are in no prefix cache."""
        return [
            replace(load, prompt_ids=[generator.randrange(vocab) for _ in load.prompt_ids])
            for load in lengths
        ]

    def ours() -> None:
        serve(engine, fresh())

    fns = {"minillm": partial(seconds, ours, model.device)}
    peer = "transformers' continuous batching"
    with ExitStack() as stack:  # both engines are set up, graphs included, before they are timed
        if model.device.type == "cuda" and has("transformers", recording, peer):
            theirs = stack.enter_context(transformers_continuous(transformers_twin(model)))
            fns[peer] = partial(seconds, lambda: theirs(fresh()), model.device)
        times = alternate(fns, repeats)
    took = {name: median(values) for name, values in times.items()}
    ours_took = took.pop("minillm")
    row = {
        "what": f"{n_requests} requests at once, {model.config.name}, bfloat16",
        "value": tokens / ours_took,
        "unit": "tokens/s",
        "against": {name: other / ours_took for name, other in took.items()},
    }
    _print(row)
    recording.add(row, {f"{n_requests} requests, {name}": v for name, v in times.items()})


def measure_layouts(
    recording: Recording, n: int = 64, length: int = 2048, repeats: int = 7
) -> None:
    """One row: the speed of paged attention over contiguous attention, for the same work."""
    device = recording.device
    calls = paged_and_contiguous(device, n, length)
    timed = partial(kernel_seconds, device=device, as_graph=True)
    fns = {name: partial(timed, call) for name, call in calls.items()}
    times = alternate(fns, repeats)
    row = {
        "what": f"paged attention, {n} sequences of {length}",
        "value": median(times["contiguous"]) / median(times["paged"]),
        "unit": "× contiguous",
    }
    _print(row)
    recording.add(row, times)


def paged_and_contiguous(
    device: torch.device, n: int, length: int, kv_dtype: str | None = None
) -> dict[str, Callable[[], Tensor]]:
    """Attention of one new token of each of `n` sequences: the same numbers in both layouts.

    32 query heads share 8 key/value heads of 128. kv_dtype: that of the pages, as an engine has it.
    """
    size, dtype = 16, torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(n, 1, 32, 128, device=device, dtype=dtype)
    k, v = torch.randn(2, n, length, 8, 128, device=device, dtype=dtype)
    order = torch.randperm(n * length // size, device=device)  # a sequence's blocks lie anywhere
    like: Any = SimpleNamespace(kv_shape=(1, 8, 128), dtype=dtype, device=device)  # as of a model
    storage = storage_for(kv_dtype)(like, (len(order), size))
    storage.write(0, order, *(x.reshape(len(order), size, 8, 128) for x in (k, v)))
    lens = torch.tensor([[length] * n, [1] * n], dtype=torch.int32, device=device)
    layout = RaggedLayout(order.int().reshape(n, -1), lens, [length] * n, [1] * n, size)
    pages, read = storage.layers[0], partial(storage.read, 0)
    return {
        "contiguous": lambda: attention(q, k, v),
        "paged": lambda: layout.attention(q[:, 0], pages, read, 128**-0.5, "auto")[:, None],
    }


def _print(row: dict[str, object]) -> None:
    print(f"{row['what']}: {row['value']:,.2f} {row['unit']}")
