"""Greedy cached decoding, batch 1, against the time to read all weights, and transformers.

Where the time goes on two threads of a Xeon, SmolLM2-135M in float32: each of its 121 matrix
products has a start-up cost, so the products alone take longer than reading all weights once. The
rest is the dozen small operations between two products of a layer. They take several times as long
as without the products: the weights evict everything else from the caches, so the code of Python
and PyTorch is fetched from memory again after each.
Tried there without gain: weights in huge pages; MKL's packed weights; oneDNN's (slower there, but a
good deal faster on AMD CPUs, so they have a row of their own); torch.compile around the small
operations. Transposed weights are read slightly faster, which is not worth the confusion.
What helped: one product for q, k, v and one for gate, up; RoPE in two fused operations; no mask and
no expanded heads for a single token; one module per layer.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minillm import costs
from minillm.bench.models import default_model, random_model
from minillm.bench.peers import has, transformers_generate, transformers_twin
from minillm.bench.recording import Recording, dtype_name
from minillm.generation import generate
from minillm.measure import alternate, read_bandwidth, seconds
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.serving.cuda_graphs import WORTH_CAPTURING, graphed_step


def bench(device: torch.device) -> Path:
    """Measure the default model, and on a GPU Llama-3-8B's shapes as well."""
    model, (prompt,) = default_model(device, ["The three laws of robotics are"])
    settings = {"model": model.config.name, "prompt_tokens": len(prompt), "new_tokens": 64}
    recording = Recording("decode", device, settings)
    measure_decode(recording, model, prompt, 64)
    if device.type == "cuda":
        del model
        measure_decode(recording, random_model("llama-3-8b", device), prompt, 64, peer=False)
    return recording.path


def first_tokens(n: int, device: torch.device) -> int:
    """New tokens of the shorter of two runs: on a GPU enough for both to capture a graph."""
    return max(n, WORTH_CAPTURING) if device.type == "cuda" else 1


def fastest(model: Decoder, prompt: list[int], n: int) -> list[int]:
    """`generate`, with CUDA graphs for the decode steps on a GPU."""
    return generate(model, prompt, n, step=graphed_step(model, len(prompt), n))


def decode_seconds(generate_n: Callable[[int], Any], n: int, device: torch.device) -> float:
    """Seconds per decoded token: a longer run minus a shorter one cancels prefill and set-up."""
    first = first_tokens(n, device)
    before = seconds(lambda: generate_n(first), device)
    return (seconds(lambda: generate_n(first + n), device) - before) / n


def measure_decode(
    recording: Recording,
    model: Decoder,
    prompt: list[int],
    n: int,
    *,
    peer: bool = True,
    repeats: int = 7,
) -> None:
    """One row: tokens per second of `generate`, as a share of the bound, against transformers.

    On a CPU a second row has prepacked matrices.
    """
    device, dtype, name = model.device, dtype_name(model.dtype), model.config.name
    context = len(prompt) + first_tokens(n, device) + n // 2  # on average, where it is timed
    moved = costs.decode_bytes(model.config, 1, context, dtype)
    forms = {f"decode, {name}, {dtype}": model}
    if device.type == "cpu" and dtype == "float32":
        forms[f"decode, {name}, {dtype}, prepacked"] = prepack(model)

    def timed(form: Decoder) -> Callable[[], float]:
        return lambda: decode_seconds(lambda k: fastest(form, prompt, k), n, device)

    fns = {what: timed(form) for what, form in forms.items()}
    if peer and has("transformers", recording, "transformers"):
        twin = transformers_twin(model)
        fns["transformers"] = lambda: decode_seconds(
            lambda k: transformers_generate(twin, prompt, k), n, device
        )
    # The bound takes its turn like the others: shared memory is not always equally fast.
    fns["bound"] = lambda: moved / read_bandwidth(device, model.dtype)
    times = alternate(fns, repeats)
    took = {who: median(values) for who, values in times.items()}
    bound = took.pop("bound")
    print(f"each token reads {moved / 1e6:.0f} MB: at least {bound * 1e3:.2f} ms")
    repeated = {f"{name}: {who}": t for who, t in times.items()}
    for what in forms:
        against = {who: took[who] / took[what] for who in took if who not in forms}
        share = bound / took[what]
        print(f"  {what}: {took[what] * 1e3:.2f} ms, {share:.0%} of the bound", against)
        row = {"what": what, "value": 1 / took[what], "unit": "tokens/s"}
        row |= {"of_bound": share, "against": against}
        recording.add(row, repeated)
