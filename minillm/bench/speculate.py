"""Speculative decoding: each drafter on each kind of text, against plain decoding and transformers.

The target computes in bfloat16, where on a CPU a pass over a few tokens takes little longer than
one over a single token. Bound: none of its own; the prediction is `speculative.speedup` with the
acceptance, the cost of a draft and the cost of a verification that are measured here. It leaves out
what is around the passes: drawing, comparing, forgetting.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from minillm.bench.decode import decode_seconds
from minillm.bench.peers import has, transformers_twin
from minillm.bench.recording import Recording, alternate
from minillm.drafters import Drafter, ModelDrafter, NgramDrafter
from minillm.engine import Engine
from minillm.engine_config import EngineConfig
from minillm.evaluate import evaluation_text
from minillm.generate import generate
from minillm.kv_cache import KVCache
from minillm.measure import seconds
from minillm.model import Decoder
from minillm.speculative import acceptance, speculative_generate, speedup
from minillm.student import PACKAGED, load_student
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

N_NEW, KS = 64, (1, 2, 4)
Prompts = list[list[int]]


def bench(device: torch.device) -> Path:
    """On a CPU: the default checkpoint and its student."""
    from minillm.weights import load

    if device.type == "cuda":
        raise ValueError(
            "bench speculate needs the default checkpoint's weights; give --device cpu."
        )
    target, tokenizer = load(device=device, dtype="bfloat16")
    assert tokenizer is not None
    student = load_student(load(device=device, dtype="int4")[0])
    recording = Recording("speculate", device, {"target": "bfloat16", "student": "int8, int8 head",
                                                "new_tokens": N_NEW})  # fmt: skip
    texts = prompts_of(tokenizer)
    measure_rows(recording, device)
    drafters = {"student": ModelDrafter(student), "n-grams": NgramDrafter()}
    twins = None
    if has("transformers", recording, "transformers"):
        twins = transformers_twin(target), transformers_twin(load_student(target))
    for name, prompts in texts.items():
        measure_text(recording, name, prompts, target, drafters, student, twins)
    measure_engine(recording, texts["chat"], target, drafters)
    return recording.path


def prompts_of(tokenizer: Tokenizer) -> dict[str, Prompts]:
    """Copying: a text to repeat. Chat: questions the student never saw. Prose: a novel goes on."""
    tried = json.loads(PACKAGED.with_suffix(".json").read_text(encoding="utf-8"))["tried"]
    novel, manual = evaluation_text("austen"), evaluation_text("python")
    copying = [
        tokenizer.chat([{"role": "user", "content": f"Repeat this text word for word:\n\n{part}"}])
        for part in (manual[2000:2700], novel[9000:9700])
    ]
    prose = [tokenizer.encode(novel[start : start + 600]) for start in (3000, 40000)]
    return {"copying": copying, "chat": [prompt for prompt, _ in tried[:16]], "prose": prose}


@torch.inference_mode()
def pass_seconds(model: Decoder, rows: int, context: int = 128, repeats: int = 7) -> float:
    """Seconds of a pass over so many tokens after `context` others, with their logits."""
    cache = KVCache(model, 1, context + rows)
    tokens = (torch.arange(context + rows) * 7 % model.config.vocab_size)[None].to(model.device)
    model.hidden(tokens[:, :context], cache)
    times = []
    for _ in range(repeats):
        times.append(seconds(lambda: model(tokens[:, context:], cache), model.device))
        cache.rewind(rows)
    return median(times)


def measure_rows(recording: Recording, device: torch.device) -> None:
    """Milliseconds of a pass over 1 to 32 tokens in each format: where verification is cheap."""
    from minillm.prepack import prepack
    from minillm.weights import load

    table = recording.document["milliseconds a pass"] = {}
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        model, _ = load(device=device, dtype=dtype)
        forms = {dtype: model}
        if dtype == "float32":
            forms["float32, prepacked"] = prepack(model)
        for name, form in forms.items():
            table[name] = {
                rows: pass_seconds(form, rows) * 1e3 for rows in (1, 2, 3, 4, 5, 7, 8, 16, 32)
            }
            print(name, {rows: round(ms, 1) for rows, ms in table[name].items()}, flush=True)
    recording.add(None, {})


def measure_text(
    recording: Recording,
    name: str,
    prompts: Prompts,
    target: Decoder,
    drafters: dict[str, Drafter],
    student: Decoder,
    twins: "tuple[LlamaForCausalLM, LlamaForCausalLM] | None",
    repeats: int = 3,
) -> None:
    """A row for each drafter at its best k, with what was predicted for it."""
    prompts = prompts[:4]

    def timed(new: Callable[[list[int], int], object]) -> Callable[[], float]:
        """Seconds a token after the first one: prompts are not counted."""
        return lambda: decode_seconds(lambda n: [new(p, n) for p in prompts], N_NEW, target.device)

    def ours(drafter: Drafter, k: int) -> Callable[[], float]:
        return timed(lambda p, n: speculative_generate(target, drafter, p, n, k=k))

    def theirs(**options: object) -> Callable[[], float]:
        return timed(lambda p, n: transformers_new(twins[0], p, n, options))

    fns = {"plain": timed(lambda p, n: generate(target, p, n))}
    fns |= {f"{d}, k = {k}": ours(drafters[d], k) for d in drafters for k in KS}
    if twins is not None:
        fns |= {
            "transformers, plain": theirs(),
            "transformers, n-grams": theirs(prompt_lookup_num_tokens=4),
            "transformers, student": theirs(assistant_model=twins[1]),
        }
    times = alternate(fns, repeats)
    took = {what: median(values) for what, values in times.items()}
    one = pass_seconds(target, 1)
    costs = {"student": pass_seconds(student, 1) / one, "n-grams": 0.0}
    cases = recording.document.setdefault("cases", {})
    for which, drafter in drafters.items():
        for k in KS:
            results = [speculative_generate(target, drafter, p, 1 + N_NEW, k=k) for p in prompts]
            # The prompt's own pass yields one token without guesses.
            calls = sum(r.target_calls for r in results) - len(results)
            per_pass = (sum(len(r.tokens) for r in results) - len(results)) / calls
            rows = 1 + sum(r.drafted for r in results) / calls
            alpha, c = acceptance(per_pass, k), costs[which]
            v = pass_seconds(target, round(rows)) / one
            cases[f"{name}, {which}, k = {k}"] = {
                "tokens per pass": per_pass,
                "alpha": alpha,
                "c": c,
                "v": v,
                "formula": speedup(alpha, k, c),
                "predicted": per_pass / (c * (rows - 1) + v),
                "measured": took["plain"] / took[f"{which}, k = {k}"],
            }
        best = min(KS, key=lambda k: took[f"{which}, k = {k}"])
        mine = took[f"{which}, k = {best}"]
        against = {"plain decoding": took["plain"] / mine}
        if twins is not None:
            against["transformers, the same way"] = took[f"transformers, {which}"] / mine
        row = {
            "what": f"speculation, {name}, {which}, k = {best}",
            "value": len(prompts) / mine,
            "unit": "tokens/s",
            "against": against,
        }
        print(row, cases[f"{name}, {which}, k = {best}"], flush=True)
        recording.add(row, {f"{name}: {what}": values for what, values in times.items()})


@torch.inference_mode()
def transformers_new(
    twin: "LlamaForCausalLM", prompt: list[int], n: int, options: dict[str, object]
) -> None:
    """n greedy tokens, with transformers' own speculation where asked for."""
    limits = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
    ending = {"pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor([prompt], device=twin.device)
    twin.generate(ids, attention_mask=torch.ones_like(ids), **limits, **ending, **options)


def measure_engine(
    recording: Recording, prompts: Prompts, target: Decoder, drafters: dict[str, Drafter]
) -> None:
    """A row for each batch size and drafter: chat, several requests at once."""
    for batch in (1, 4, 16):

        def serve(drafter: Drafter | None, batch: int = batch) -> float:
            config = EngineConfig(n_blocks=512, drafter=drafter, k=3, prefix_caching=False)
            engine = Engine(target, config)
            for i in range(batch):
                engine.submit(prompts[i % len(prompts)], N_NEW)
            return seconds(engine.run, target.device)

        fns = {"plain": lambda: serve(None)}
        fns |= {name: (lambda d: lambda: serve(d))(drafter) for name, drafter in drafters.items()}
        times = alternate(fns, 3)
        took = {name: median(values) for name, values in times.items()}
        for name in drafters:
            row = {
                "what": f"speculation in the engine, {batch} at once, {name}",
                "value": batch * N_NEW / took[name],
                "unit": "tokens/s",
                "against": {"without guesses": took["plain"] / took[name]},
            }
            print(row, flush=True)
            recording.add(row, {f"engine {batch}, {what}": v for what, v in times.items()})
