"""Fewer bits, fewer weights: bytes, quality and speed together, and against llama.cpp.

Bound of decode: the stored bytes over the measured bandwidth (`quantize.decode_bytes`). Quality is
measured at the beginning of two texts, whose ends are the calibration data: perplexity, and against
the float32 model the KL divergence and the agreement of the most likely tokens. The default
checkpoint is in 4 bits already: `load(dtype="int4")` keeps its numbers, `quantize` rounds them
again.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minillm.bench.decode import decode_seconds
from minillm.bench.peers import LLAMA_CPP, has, llama_cpp_decode_seconds
from minillm.bench.recording import Recording
from minillm.evaluate import difference, evaluation_text, perplexity
from minillm.generation import generate
from minillm.kv_cache import KVCache
from minillm.measure import alternate, read_bandwidth, seconds
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.quantization.kv_cache import QuantizedKVCache
from minillm.quantization.quantize import decode_bytes, model_bytes, quantize
from minillm.quantization.sparsity import sparsify

Forms = dict[str, Callable[[], Decoder]]


def bench(device: torch.device) -> Path:
    """Measure the default checkpoint in every form, on a CPU."""
    from minillm.weights.loading import load

    if device.type == "cuda":
        raise ValueError(
            "bench quantize needs the default checkpoint's weights; give --device cpu."
        )
    model, tokenizer = load(device=device, dtype="float32")
    assert tokenizer is not None
    ids = {name: tokenizer.encode(evaluation_text(name)) for name in ("python", "austen")}
    # Calibrated on the ends, evaluated on the beginnings: no token is seen twice.
    ends = {name: torch.tensor(tokens[-8 * 256 :]).view(8, 256) for name, tokens in ids.items()}
    texts = {name: tokens[:2048] for name, tokens in ids.items()}
    settings = {"model": model.config.name, "calibration": "the last 8 x 256 tokens of each text",
                "evaluation": "the first 2048 tokens of each text"}  # fmt: skip
    recording = Recording("quantize", device, settings)
    forms = _forms(model, lambda dtype: load(device=device, dtype=dtype)[0], ends)
    prompt = tokenizer.encode("The three laws of robotics are")
    fast = ("bfloat16", "int8", "int4, the file's own", "w8a8", "2:4, magnitude")
    models = {"float32": model}
    if torch.backends.mkldnn.is_available():
        models["prepacked float32"] = prepack(model)
    measure_speed(recording, models | {name: forms[name]() for name in fast}, prompt)
    measure_quality(recording, model, forms, texts)
    measure_caches(recording, model, texts["python"][:1024])
    return recording.path


def _forms(
    model: Decoder, load: Callable[[str], Decoder], calibration: dict[str, torch.Tensor]
) -> Forms:
    """Every form of the model, by its name in the tables. calibration: a batch of each text."""

    def made(scheme: str, **options: Any) -> Callable[[], Decoder]:
        return lambda: quantize(model, scheme, **options)

    def sparse(**options: Any) -> Callable[[], Decoder]:
        return lambda: sparsify(model, **options)

    known, half_known = list(calibration.values()), calibration["python"]
    return {
        "float32": lambda: model,
        "bfloat16": lambda: load("bfloat16"),
        "int8": made("int8"),
        "fp8": made("fp8"),
        "w8a8, one scale a tensor": made("w8a8", per="tensor"),
        "w8a8": made("w8a8"),
        "llm_int8": made("llm_int8"),
        "llm_int8, calibrated": made("llm_int8", calibration=known),
        "smoothquant": made("smoothquant", calibration=known),
        "int4, the file's own": lambda: load("int4"),
        "int4": made("int4"),
        "int4, groups of 64": made("int4", group_size=64),
        "int4, symmetric": made("int4", symmetric=True),
        "gptq": made("gptq", calibration=known),
        "awq": made("awq", calibration=known),
        "3 bits": made("int4", bits=3),
        "3 bits, gptq": made("gptq", bits=3, calibration=known),
        "3 bits, gptq, python only": made("gptq", bits=3, calibration=half_known),
        "3 bits, awq": made("awq", bits=3, calibration=known),
        "2:4, magnitude": sparse(),
        "2:4, wanda": sparse(method="wanda", calibration=known),
        "2:4, wanda, recovered": sparse(method="wanda", recover=True, calibration=known),
        "2:4, wanda, recovered, int8": sparse(
            method="wanda", recover=True, values="int8", calibration=known
        ),
    }  # fmt: skip


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


def measure_quality(
    recording: Recording, model: Decoder, forms: Forms, texts: dict[str, list[int]]
) -> None:
    """For every form: bytes, perplexity on each text, KL divergence and agreement on the first."""
    first = next(iter(texts.values()))
    quality = recording.document["quality"] = {}
    for name, make in forms.items():
        form = make()
        found = difference(form, model, first)
        quality[name] = {
            "bytes": model_bytes(form),
            "perplexity": {text: perplexity(form, ids) for text, ids in texts.items()},
            "kl": found.kl,
            "agreement": found.agreement,
        }
        print(f"{name}: {quality[name]}", flush=True)
        recording.add(None, {})
        del form  # before the next one is made, so that only one is in memory
        gc.collect()


@torch.inference_mode()
def measure_caches(recording: Recording, model: Decoder, ids: list[int]) -> None:
    """For every form of the KV cache: bytes per token, KL divergence and agreement."""
    tokens = torch.tensor([ids])
    right = model(tokens)[0].log_softmax(-1)  # (T, V)
    caches = recording.document["caches"] = {}
    for bits in (8, 4):
        for keys in ("token", "channel"):
            cache = QuantizedKVCache(model, 1, len(ids), bits=bits, keys=keys)
            found = model(tokens, cache)[0].log_softmax(-1)
            kl = torch.nn.functional.kl_div(found, right, log_target=True, reduction="sum")
            same = (found.argmax(-1) == right.argmax(-1)).float().mean()
            caches[f"int{bits}, keys per {keys}"] = {
                "bytes_per_token": cache.nbytes / len(ids),
                "kl": float(kl) / len(ids),
                "agreement": float(same),
            }
    print(caches)
    recording.add(None, {})
