"""Speculative decoding: each drafter on each kind of text, against plain decoding and transformers.

The target computes in the format, of 16 bits or more, in which a pass over a few tokens costs least
compared with a pass over one. The table of passes, measured first, says which format that is. One
text is answered with a target in int4 as well, the fastest format without draft tokens.

There is no bound; instead there is a prediction (`prediction`), from the counted tokens per pass
and that table. It leaves out the work between passes: drawing, comparing, rewinding the cache.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from minillm.bench.decode import decode_seconds
from minillm.bench.peers import has, transformers_twin
from minillm.bench.recording import Recording
from minillm.distillation.student import PACKAGED, load_student
from minillm.evaluate import evaluation_text
from minillm.generation import generate
from minillm.kv_cache import KVCache
from minillm.measure import alternate, seconds
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.serving.engine import Engine
from minillm.serving.engine_config import EngineConfig
from minillm.serving.proposals import Pace, Proposals
from minillm.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from minillm.speculation.formulas import acceptance, speedup
from minillm.speculation.speculative import SpeculativeResult, speculative_generate
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

N_NEW, KS, ENGINE_K, REPEATS = 48, (1, 2, 4), 3, 5
ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 64)
"""Tokens in the passes of the table."""
FEW = 4
"""Tokens in the pass that verifies 3 draft tokens."""
PREPACKED = ", prepacked"
Prompts = list[list[int]]


def bench(device: torch.device) -> Path:
    """Measure the default checkpoint and its student, on a CPU."""
    from minillm.weights.loading import load

    if device.type == "cuda":
        raise ValueError(
            "bench speculate needs the default checkpoint's weights; give --device cpu."
        )
    fast, _ = load(device=device, dtype="int4")
    student = load_student(fast)
    recording = Recording("speculate", device, {"student": "int8, int8 head",
                                                "new_tokens": N_NEW})  # fmt: skip
    fmt = measure_rows(recording, device, student)
    recording.document["settings"]["target"] = fmt
    plain, tokenizer = load(device=device, dtype=fmt.removesuffix(PREPACKED))
    assert tokenizer is not None
    target = prepack(plain) if fmt.endswith(PREPACKED) else plain
    texts = prompts_of(tokenizer)
    drafters = {"student": ModelDrafter(student), "n-grams": NgramDrafter()}
    twins = None  # transformers' target and student, with the same weights
    if has("transformers", recording, "transformers"):
        twins = transformers_twin(plain), transformers_twin(load_student(plain))
    for name, prompts in texts.items():
        measure_text(recording, name, prompts, fmt, target, drafters, twins)
    measure_text(recording, "chat in int4", texts["chat"], "int4", fast, drafters, None)
    measure_engine(recording, texts["chat"], target, drafters)
    return recording.path


def prompts_of(tokenizer: Tokenizer) -> dict[str, Prompts]:
    """Copying: a text to repeat. Chat: questions new to the student. Prose: a novel to continue."""
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
    """Seconds of a pass over `rows` tokens after `context` others, with their logits."""
    cache = KVCache(model, 1, context + rows)
    tokens = (torch.arange(context + rows) * 7 % model.config.vocab_size)[None].to(model.device)
    model.hidden(tokens[:, :context], cache)
    times = []
    for _ in range(repeats):
        times.append(seconds(lambda: model(tokens[:, context:], cache), model.device))
        cache.rewind(rows)
    return median(times)


def pass_milliseconds(model: Decoder) -> dict[int, float]:
    """Of a pass over each number of tokens in ROWS: the best of three rounds over all of them.

    Whatever slows the machine for a second then slows one round, and not one row of the table.
    """
    rounds = [{rows: pass_seconds(model, rows) for rows in ROWS} for _ in range(3)]
    return {rows: min(times[rows] for times in rounds) * 1e3 for rows in ROWS}


def measure_rows(recording: Recording, device: torch.device, student: Decoder) -> str:
    """Milliseconds of a pass over a few tokens in each format; returns the best format's name.

    The best is that in which FEW tokens cost least compared with one, among those of at least 16
    bits, since transformers is compared in the same format.
    """
    from minillm.weights.loading import load

    table = recording.document["milliseconds a pass"] = {}
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        model, _ = load(device=device, dtype=dtype)
        forms = {dtype: model}
        if dtype == "float32":
            forms[dtype + PREPACKED] = prepack(model)
        for name, form in forms.items():
            table[name] = pass_milliseconds(form)
            print(name, {rows: round(ms, 1) for rows, ms in table[name].items()}, flush=True)
    table["student"] = pass_milliseconds(student)
    recording.add(None, {})
    ratios = {n: table[n][FEW] / table[n][1] for n in table if n.startswith(("float", "bfloat"))}
    return min(ratios, key=ratios.get)


def measure_text(
    recording: Recording,
    name: str,
    prompts: Prompts,
    fmt: str,
    target: Decoder,
    drafters: dict[str, Drafter],
    twins: "tuple[LlamaForCausalLM, LlamaForCausalLM] | None",
) -> None:
    """A row for each drafter at its best k, with the prediction for it.

    fmt: the target's format, a name in the table of passes.
    """
    prompts = prompts[:4]
    times = alternate(_text_calls(prompts, target, drafters, twins), REPEATS)
    took = {what: median(values) for what, values in times.items()}
    cases = recording.document.setdefault("cases", {})
    for which, drafter in drafters.items():
        for k in KS:
            results = [speculative_generate(target, drafter, p, 1 + N_NEW, k=k) for p in prompts]
            cases[f"{name}, {which}, k = {k}"] = prediction(recording, fmt, which, results, k) | {
                "measured": took["plain"] / took[f"{which}, k = {k}"],
            }
        # Only the fastest k has a row; the others are in `cases`.
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


def _text_calls(
    prompts: Prompts,
    target: Decoder,
    drafters: dict[str, Drafter],
    twins: "tuple[LlamaForCausalLM, LlamaForCausalLM] | None",
) -> dict[str, Callable[[], float]]:
    """By name, functions that time a token after the first of all prompts: the prompts don't count.

    Plain decoding, every drafter with every k, and transformers' ways.
    """

    def timed(new: Callable[[list[int], int], object]) -> Callable[[], float]:
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
    return fns


def prediction(
    recording: Recording, fmt: str, which: str, results: list[SpeculativeResult], k: int
) -> dict[str, float]:
    """The speedup that rounds of at most k draft tokens should give, by the table of passes.

    fmt: the target's format, a name in that table.

    "formula" is Leviathan's, which takes every pass to cost the same. "predicted" uses the actual
    number of draft tokens, and the cost of a pass over that many rows.
    """
    table = recording.document["milliseconds a pass"]
    target, student = table[fmt], table["student"]
    # The prompt's own pass gives one token, without draft tokens.
    calls = sum(r.target_calls for r in results) - len(results)
    per_pass = (sum(len(r.tokens) for r in results) - len(results)) / calls
    drafted = sum(r.drafted for r in results) / calls
    # Relative to a pass over one token: a draft token, and the pass that verifies.
    c = student[1] / target[1] if which == "student" else 0.0
    v = float(np.interp(1 + drafted, list(target), list(target.values()))) / target[1]
    alpha = acceptance(per_pass, k)
    return {
        "tokens per pass": per_pass,
        "guesses per pass": drafted,
        "alpha": alpha,
        "c": c,
        "v": v,
        "formula": speedup(alpha, k, c),
        "predicted": per_pass / (c * drafted + v),
    }


@torch.inference_mode()
def transformers_new(
    twin: "LlamaForCausalLM", prompt: list[int], n: int, options: dict[str, object]
) -> None:
    """n greedy tokens, with transformers' own speculation if `options` ask for it."""
    ids = torch.tensor([prompt], device=twin.device)
    twin.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n,
        do_sample=False, pad_token_id=0, eos_token_id=None, **options,
    )  # fmt: skip


class Always(Pace):
    """Draft in every step, whatever it costs. k still adapts to what is accepted."""

    draft = True


def measure_engine(
    recording: Recording, prompts: Prompts, target: Decoder, drafters: dict[str, Drafter]
) -> None:
    """A row for each batch size and drafter: chat, several requests at once, on a warm engine.

    "always" shows where draft tokens stop paying, which the engine otherwise finds out itself.
    """
    plain = EngineConfig(n_blocks=512, prefix_caching=False)

    def serve(batch: int, engine: Engine) -> float:
        for i in range(batch):
            engine.submit(prompts[i % len(prompts)], N_NEW)
        return seconds(engine.run, target.device)

    engines = {"plain": Engine(target, plain)}
    for name, drafter in drafters.items():
        engines[name] = Engine(target, replace(plain, drafter=drafter, k=ENGINE_K))
    always = Proposals(
        drafters["student"], target, ENGINE_K, n_blocks=plain.n_blocks,
        block_size=plain.block_size, pace=Always,
    )  # fmt: skip
    engines["student, always"] = Engine(target, plain, proposer=always)
    for batch in (1, 4, 16):  # the engines stay warm from one to the next
        fns = {name: partial(serve, batch, engine) for name, engine in engines.items()}
        times = alternate(fns, REPEATS)
        took = {name: median(values) for name, values in times.items()}
        for name in (*drafters, "student, always"):
            row = {
                "what": f"speculation in the engine, {batch} at once, {name}",
                "value": batch * N_NEW / took[name],
                "unit": "tokens/s",
                "against": {"without guesses": took["plain"] / took[name]},
            }
            print(row, flush=True)
            recording.add(row, {f"engine {batch}, {what}": v for what, v in times.items()})
