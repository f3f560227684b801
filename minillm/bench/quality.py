"""What fewer bits and fewer weights cost: perplexity, KL divergence, agreement.

Measured at the beginning of two texts. The calibration data are their ends, eight tokens for each
column of the widest matrix, so that no token is seen twice.

    float32, int8, ...         the default checkpoint. Its file has 4 bits in groups of 32, and
                               rounding it to 4 bits in groups of 32 finds these numbers again
    int4, shifted, ...         the same function with its channels renumbered: each group of 32 has
                               weights from two groups of the file, so its 4 bits are a new grid
    student: int4, ...         the packaged student, which was trained in full precision
"""

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.bench.recording import Recording
from minillm.evaluate import difference, evaluation_text, perplexity
from minillm.model import Decoder
from minillm.quantization.kv_cache import GROUP, QuantizedKVCache
from minillm.quantization.quantize import model_bytes, quantize
from minillm.quantization.sparsity import sparsify

Forms = dict[str, Callable[[], Decoder]]
EVALUATED = 2048
CALIBRATED = 8 * 1536
"""Tokens: eight for each column of the widest matrix of the default checkpoint, `down`."""


def bench(device: torch.device) -> Path:
    """Measure the default checkpoint and the packaged student in every form, on a CPU."""
    from minillm.distillation.student import load_student
    from minillm.weights.loading import load

    if device.type == "cuda":
        raise ValueError("bench quality needs the default checkpoint; give --device cpu.")
    model, tokenizer = load(device=device, dtype="float32")
    assert tokenizer is not None
    ids = {name: tokenizer.encode(evaluation_text(name)) for name in ("python", "austen")}
    texts = {name: tokens[:EVALUATED] for name, tokens in ids.items()}
    half = CALIBRATED // 2
    settings = {
        "model": model.config.name,
        "calibration": f"the last {half} tokens of each text, or {CALIBRATED} of the first",
        "evaluation": f"the first {EVALUATED} tokens of each text",
    }
    recording = Recording("quality", device, settings)
    known = [batch for tokens in ids.values() for batch in _batches(tokens[-half:])]
    half_known = _batches(ids["python"][-CALIBRATED:])
    measure_quality(recording, model, forms(model, known, half_known), texts)
    own = {"int4, the file's own": lambda: load(device=device, dtype="int4")[0]}
    measure_quality(recording, model, own, texts)
    shifted = renumbered(model, 16)
    measure_quality(recording, model, four_bits(shifted, known, "{}, shifted"), texts)
    student = load_student(model)
    measure_quality(recording, student, four_bits(student, known, "student: {}"), texts)
    measure_caches(recording, model, texts["python"][:1024])
    return recording.path


def _batches(tokens: list[int]) -> list[Tensor]:
    """Windows of 256 tokens, eight to a batch (8, 256)."""
    return list(torch.tensor(tokens).view(-1, 8, 256))


def forms(model: Decoder, known: list[Tensor], half_known: list[Tensor]) -> Forms:
    """Every form of the model, by its name in the tables. known: what it is calibrated with."""
    reduced, sparse = partial(partial, quantize, model), partial(partial, sparsify, model)
    wanda = {"method": "wanda", "calibration": known}
    return {
        "float32": lambda: model,
        "bfloat16": lambda: copy.deepcopy(model).bfloat16(),
        "int8": reduced("int8"),
        "fp8": reduced("fp8"),
        "w8a8, one scale a tensor": reduced("w8a8", per="tensor"),
        "w8a8": reduced("w8a8"),
        "llm_int8": reduced("llm_int8"),
        "llm_int8, calibrated": reduced("llm_int8", calibration=known),
        "smoothquant": reduced("smoothquant", calibration=known),
        "int4": reduced("int4"),
        "int4, groups of 64": reduced("int4", group_size=64),
        "int4, symmetric": reduced("int4", symmetric=True),
        "3 bits": reduced("int4", bits=3),
        "3 bits, gptq, one pass": reduced("gptq", bits=3, calibration=known, sequential=False),
        "3 bits, gptq": reduced("gptq", bits=3, calibration=known),
        "3 bits, gptq, python only": reduced("gptq", bits=3, calibration=half_known),
        "3 bits, awq": reduced("awq", bits=3, calibration=known),
        "2:4, magnitude": sparse(),
        "2:4, wanda, one pass": sparse(**wanda, sequential=False),
        "2:4, wanda": sparse(**wanda),
        "2:4, wanda, recovered": sparse(**wanda, recover=True),
        "2:4, wanda, recovered, int8": sparse(**wanda, recover=True, values="int8"),
    }


def four_bits(model: Decoder, known: list[Tensor], name: str) -> Forms:
    """The model as it is and in 4 bits by each way to round. name: "{}, shifted"."""
    reduced = partial(partial, quantize, model)
    found = {
        "float32": lambda: model,
        "int4": reduced("int4"),
        "gptq": reduced("gptq", calibration=known),
        "awq": reduced("awq", calibration=known),
    }
    return {name.format(scheme): make for scheme, make in found.items()}


@torch.no_grad()
def renumbered(model: Decoder, shift: int) -> Decoder:
    """The same function with its channels numbered from another one on, by `shift`.

    Those of the residual stream, of each value head and of the feed-forward network. What changes
    is which weights are neighbours in a row, and so which of them share a group.
    """
    K, D = model.config.n_kv_heads, model.config.d_head

    def roll(tensor: Tensor, dim: int) -> None:
        tensor.copy_(tensor.roll(shift, dim))

    other = copy.deepcopy(model)
    for p in {other.embed.weight, other.head.weight}:  # one and the same where they are tied
        roll(p, 1)
    roll(other.norm, 0)
    for layer in other.layers:
        for norm in (layer.attn_norm, layer.mlp_norm):
            roll(norm, 0)
        for reads in (layer.qkv, layer.gate_up):  # (rows, C)
            roll(reads.weight, 1)
        for writes in (layer.out, layer.down):  # (C, columns)
            for p in writes.parameters():
                roll(p, 0)
        for p in layer.qkv.parameters():  # the values: the last K heads' rows, (K, D, …)
            roll(p[-K * D :].unflatten(0, (K, D)), 1)
        roll(layer.out.weight.unflatten(1, (-1, D)), 2)
        roll(layer.gate_up.weight.unflatten(0, (2, -1)), 1)
        roll(layer.down.weight, 1)
    return other


class Remembered:
    """A model that computes the logits of the same tokens only once."""

    def __init__(self, model: Decoder):
        self._model, self.device = model, model.device
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, tokens: Tensor) -> Tensor:
        key = tuple(tokens[0].tolist())
        if key not in self._known:
            self._known[key] = self._model(tokens)
        return self._known[key]


def measure_quality(
    recording: Recording, model: Decoder, forms: Forms, texts: dict[str, list[int]]
) -> None:
    """For every form: bytes, perplexity on each text, KL divergence and agreement on the first.

    model: what the forms are compared with.
    """
    first, original = next(iter(texts.values())), Remembered(model)
    quality = recording.document.setdefault("quality", {})
    for name, make in forms.items():
        form = make()
        judged = Remembered(form)
        found = difference(judged, original, first)
        quality[name] = {
            "bytes": model_bytes(form),
            "perplexity": {text: perplexity(judged, ids) for text, ids in texts.items()},
            "kl": found.kl,
            "agreement": found.agreement,
        }
        print(f"{name}: {quality[name]}", flush=True)
        recording.add(None, {})
        del form, judged  # before the next one is made, so that only one is in memory
        gc.collect()


@torch.inference_mode()
def measure_caches(recording: Recording, model: Decoder, ids: list[int]) -> None:
    """For every form of the KV cache: bytes per token, KL divergence and agreement.

    In passes of 32 tokens: a pass reads its own keys as they are, if they are rounded per channel.
    """
    passes = torch.tensor([ids]).split(GROUP, 1)
    right = model(torch.tensor([ids]))[0].log_softmax(-1)  # (T, V)
    caches = recording.document["caches"] = {}
    for bits in (8, 4):
        for keys in ("token", "channel"):
            cache = QuantizedKVCache(model, 1, len(ids), bits=bits, keys=keys)
            found = torch.cat([model(tokens, cache)[0] for tokens in passes]).log_softmax(-1)
            kl = F.kl_div(found, right, log_target=True, reduction="sum")
            same = (found.argmax(-1) == right.argmax(-1)).float().mean()
            caches[f"int{bits}, keys per {keys}"] = {
                "bytes_per_token": cache.nbytes / len(ids),
                "kl": float(kl) / len(ids),
                "agreement": float(same),
            }
    print(caches)
    recording.add(None, {})
