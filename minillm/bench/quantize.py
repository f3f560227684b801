"""Fewer bits, fewer weights: how fast, and against llama.cpp. `quality` has what they cost.

Bound of decode: the stored bytes over the measured bandwidth (`quantize.decode_bytes`).
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from minillm.bench.decode import decode_seconds
from minillm.bench.peers import LLAMA_CPP, has, llama_cpp_decode_seconds
from minillm.bench.recording import Recording
from minillm.generation import generate
from minillm.kv_cache import KVCache
from minillm.measure import alternate, read_bandwidth, seconds
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.quantization.quantize import decode_bytes, quantize
from minillm.quantization.sparsity import sparsify


def bench(device: torch.device) -> Path:
    """Measure the default checkpoint in several forms, on a CPU."""
    from minillm.weights.loading import load

    if device.type == "cuda":
        raise ValueError(
            "bench quantize needs the default checkpoint's weights; give --device cpu."
        )
    model, tokenizer = load(device=device, dtype="float32")
    assert tokenizer is not None
    models = {
        "float32": model,
        "bfloat16": load(device=device, dtype="bfloat16")[0],
        "int8": quantize(model, "int8"),
        "int4, the file's own": load(device=device, dtype="int4")[0],
        "w8a8": quantize(model, "w8a8"),
        "2:4, magnitude": sparsify(model),
    }
    if torch.backends.mkldnn.is_available():
        models["prepacked float32"] = prepack(model)
    recording = Recording("quantize", device, {"model": model.config.name})
    measure_speed(recording, models, tokenizer.encode("The three laws of robotics are"))
    return recording.path


def measure_speed(
    recording: Recording, models: dict[str, Decoder], prompt: list[int], *,
    n: int = 48, prompt_tokens: int = 512, repeats: int = 7,
) -> None:  # fmt: skip
    """Two rows for each form: decoded tokens per second, and prompt tokens per second."""
    _measure_decode(recording, models, prompt, n, repeats)
    _measure_prefill(recording, models, prompt_tokens, repeats)


def _measure_decode(
    recording: Recording, models: dict[str, Decoder], prompt: list[int], n: int, repeats: int
) -> None:
    device = recording.device

    def timed(model: Decoder) -> Callable[[], float]:
        return lambda: decode_seconds(lambda k: generate(model, prompt, k), n, device)

    fns = {name: timed(model) for name, model in models.items()}
    if has("xllamacpp", recording, LLAMA_CPP):
        threads = torch.get_num_threads()
        fns[LLAMA_CPP] = lambda: llama_cpp_decode_seconds(prompt, n, threads)
    # The bandwidth takes its turn like the others: shared memory is not always equally fast.
    fns["second per byte"] = lambda: 1 / read_bandwidth(device, torch.bfloat16)
    times = alternate(fns, repeats)
    bandwidth = [1 / t for t in times.pop("second per byte")]
    took = {name: median(values) for name, values in times.items()}
    context = len(prompt) + n // 2
    for name, model in models.items():
        bound = decode_bytes(model, context) / median(bandwidth)
        against = {
            other: took[other] / took[name]
            for other in ("float32", "prepacked float32", "bfloat16", LLAMA_CPP)
            if other in took and other != name
        }
        print(f"decode, {name}: {took[name] * 1e3:.2f} ms, {bound / took[name]:.0%} of the bound")
        row = {
            "what": f"decode, {name}",
            "value": 1 / took[name],
            "unit": "tokens/s",
            "of_bound": bound / took[name],
            "against": against,
        }
        recording.add(row, {f"decode {name}": times[name]})
    recording.add(None, {"bandwidth": bandwidth, LLAMA_CPP: times.get(LLAMA_CPP, [])})


def _measure_prefill(
    recording: Recording, models: dict[str, Decoder], n: int, repeats: int
) -> None:
    prefills = {name: _prefill(model, n) for name, model in models.items()}
    times = alternate(prefills, repeats)
    base = median(times["float32"])
    for name, values in times.items():
        row = {
            "what": f"prefill of {n} tokens, {name}",
            "value": n / median(values),
            "unit": "tokens/s",
            "against": {} if name == "float32" else {"float32": base / median(values)},
        }
        print(f"{row['what']}: {row['value']:.0f} tokens/s")
        recording.add(row, {f"prefill {name}": values})


def _prefill(model: Decoder, n: int) -> Callable[[], float]:
    """A function that times a prefill of n tokens."""
    tokens = (torch.arange(n, device=model.device) * 7 % model.config.vocab_size)[None]

    @torch.inference_mode()
    def once() -> None:
        model.head(model.hidden(tokens, KVCache(model, 1, n))[:, -1])

    return lambda: seconds(once, model.device)
