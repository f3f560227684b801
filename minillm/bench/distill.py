"""Kinds of distillation at equal compute: how near each brings a small student to its teacher.

Sources: Hinton et al. 2015 (soft targets); Romero et al. 2015 (inner activations); Kim and Rush
2016 (text that the teacher wrote). Every kind trains the same student, made of the teacher's first
and last layers, and may spend the same number of FLOPs. A step on soft targets has a pass of the
teacher in it, so kinds that learn from the text alone take more steps. Writing the text is not
counted. Each seed draws other rows of the texts; all students sit one exam, answers of the teacher
that none has seen.
Cost: with `FULL` 10 to 25 minutes on two cores. The teacher's states are computed once for all.
"""

import json
import random
import time
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm import costs
from minillm.bench.quality import Remembered
from minillm.bench.recording import Recording
from minillm.config import ModelConfig
from minillm.distillation.__main__ import new_student, try_student
from minillm.distillation.distill import distill
from minillm.distillation.student import PACKAGED
from minillm.distillation.teacher_text import Conversation, conversations
from minillm.evaluate import evaluation_text
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.training import warmup_and_decay

ROW = 129
"""Tokens of a row, of which 128 are predicted. A step is one row."""
KINDS: dict[str, tuple[str, dict[str, float]]] = {
    "a person's text": ("person", {"text_weight": 1.0}),
    "the teacher's text": ("teacher", {"text_weight": 1.0}),
    "a person's text, soft targets": ("person", {"text_weight": 0.0}),
    "the teacher's text, soft targets": ("teacher", {"text_weight": 0.0}),
    "the teacher's text, half soft targets": ("teacher", {"text_weight": 0.5}),
    "the teacher's text, soft targets, states": ("teacher", {"text_weight": 0.0, "states": 0.3}),
}
"""Whose text, and the options of `distill`."""


@dataclass(frozen=True)
class Size:
    """steps: of a kind with soft targets. exam: conversations that the students are judged on."""

    layers: int = 4
    steps: int = 50
    conversations: int = 256
    exam: int = 25
    seeds: int = 3
    lr: float = 1e-3


FULL = Size()


def bench(device: torch.device, size: Size = FULL) -> Path:
    """Train students of the default checkpoint in every way, and record how near they come."""
    from minillm.weights.loading import load

    teacher, tokenizer = load(device=device, dtype="float32")
    assert tokenizer is not None
    writer = prepack(teacher) if device.type == "cpu" else teacher
    written = conversations(writer, tokenizer, size.conversations, seed=1)
    texts = {
        "teacher": rows_of(list(chain.from_iterable(c.prompt + c.answer for c in written))),
        "person": rows_of(tokenizer.encode(evaluation_text("python"))),
    }
    n = min(map(len, texts.values()))  # neither may show more than the other
    print(f"  {len(written)} conversations written, {n} rows of {ROW} tokens", flush=True)
    tried = json.loads(PACKAGED.with_suffix(".json").read_text())["tried"][: size.exam]
    settings = {
        "model": teacher.config.name,
        "counted": "FLOPs of training, the teacher's passes included; writing the text is not",
        "rows": n, "tokens of a row": ROW - 1,
    }  # fmt: skip
    recording = Recording("distill", device, settings | asdict(size))
    exam = [Conversation(prompt, answer) for prompt, answer in tried]
    measure_kinds(recording, teacher, {name: rows[:n] for name, rows in texts.items()}, exam, size)
    return recording.path


def rows_of(ids: list[int]) -> Tensor:
    """Token ids as rows (N, ROW); what does not fill one is left out."""
    n = len(ids) // ROW
    return torch.tensor(ids[: n * ROW]).view(n, 1, ROW)


def step_flops(teacher: ModelConfig, n_layers: int, *, soft: bool) -> int:
    """FLOPs for a token of one training step, without attention scores.

    A forward pass takes two for each weight, the backward pass four; the shared head does not
    learn, so it takes two there. soft: with a forward pass of the teacher.
    """
    parts = costs.param_breakdown(teacher)
    layer = (parts["attention"] + parts["mlp"]) // teacher.n_layers
    head = teacher.vocab_size * teacher.d_model
    return 6 * n_layers * layer + 4 * head + soft * 2 * (teacher.n_layers * layer + head)


def drawn(rows: Tensor, n: int, seed: int) -> list[Tensor]:
    """n batches of one row each, in random order; none comes again before all have come."""
    stream, order = random.Random(seed), []
    while len(order) < n:
        order += stream.sample(range(len(rows)), len(rows))
    return [rows[i] for i in order[:n]]


def measure_kinds(
    recording: Recording, teacher: Decoder, texts: dict[str, Tensor], exam: list[Conversation],
    size: Size,
) -> None:  # fmt: skip
    """For every kind and seed: the student's KL divergence and agreement on the exam.

    texts: rows (N, 1, ROW) to learn from, by whose they are.
    """
    judge, known = Remembered(teacher), {}
    budget = size.steps * step_flops(teacher.config, size.layers, soft=True)
    untrained = try_student(new_student(teacher, size.layers), judge, exam, 0)
    recording.document["untrained"] = {name: untrained[name] for name in ("kl", "agreement")}
    kinds: dict[str, Any] = recording.document.setdefault("kinds", {})
    for seed in range(size.seeds):  # the kinds take turns, so that a run cut short is fair
        for name, (whose, options) in KINDS.items():
            soft = options["text_weight"] < 1
            steps = round(budget / step_flops(teacher.config, size.layers, soft=soft))
            student, start = new_student(teacher, size.layers), time.perf_counter()
            distill(
                teacher, student, drawn(texts[whose], steps, seed), temperature=1.0,
                lr=warmup_and_decay(size.lr, steps), autocast=True, known=known, **options,
            )  # fmt: skip
            took = time.perf_counter() - start
            found = try_student(student, judge, exam, 0)
            kind = kinds.setdefault(name, {"steps": steps, "kl": [], "agreement": []})
            kind["kl"].append(found["kl"])
            kind["agreement"].append(found["agreement"])
            print(f"{name}, seed {seed}: KL {found['kl']:.3f}, {found['agreement']:.1%}, "
                  f"{steps} steps in {took:.0f} s", flush=True)  # fmt: skip
            recording.add(None, {})
