"""The command that trained the packaged student, and the packaged Medusa heads.

    python -m minillm.distillation --layers 4 --steps 2200
    python -m minillm.distillation --heads 3

Sources: Kim and Rush 2016, section 3.2; `minillm.distillation.distill` for the loss.
It trains a student of the default checkpoint that drafts well, or Medusa heads. The teacher writes
the text (`distillation/teacher_text.py`), and the student learns the teacher's distributions on it
(the text's weight is 0). Everything is kept in a folder, so that an interrupted run can resume.
"""

import argparse
import datetime
import json
import math
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.distillation.distill import distill
from minillm.distillation.student import load_student, make_student, save_student
from minillm.distillation.teacher_text import (
    Conversation,
    continued_code,
    conversations,
    library_text,
)
from minillm.evaluate import difference
from minillm.measure import cpu_name
from minillm.model import Decoder
from minillm.prepacked import prepack
from minillm.speculation.drafters import Drafter, ModelDrafter
from minillm.speculation.medusa import MedusaDrafter, MedusaHeads
from minillm.speculation.medusa_heads import load_heads, save_heads, train_heads
from minillm.speculation.speculative import speculative_generate
from minillm.tokenizer import Tokenizer
from minillm.tools.checks import check_whole
from minillm.tools.command_line import Parser, run
from minillm.training import warmup_and_decay
from minillm.weights.loading import load

HELD_OUT = 1_000_000
"""Added to the seed for the conversations that the student is tested on, not trained on."""
ROW, ROWS = 257, 8
"""Tokens per row, and rows per batch."""


def rows_of(texts: Sequence[Sequence[int]], seed: int) -> Tensor:
    """The texts, shuffled and concatenated, cut into rows (N, ROW)."""
    order = random.Random(seed).sample(list(texts), len(texts))
    ids = [i for text in order for i in text]
    n = len(ids) // ROW
    return torch.tensor(ids[: n * ROW]).view(n, ROW)


def _data(
    teacher: Decoder, tokenizer: Tokenizer, options: argparse.Namespace
) -> tuple[Tensor, list[Conversation]]:
    """Batches (N, ROWS, ROW) to train on, and conversations that are held out."""
    folder, seed, n = options.folder, options.seed, options.conversations
    held_out = conversations(teacher, tokenizer, 32, seed=seed + HELD_OUT, cache=folder / "tried")
    # The teacher's conversations, code that it continues, and code that it did not write.
    chat = conversations(teacher, tokenizer, n, seed=seed, cache=folder)
    texts = [conversation.prompt + conversation.answer for conversation in chat]
    texts += continued_code(teacher, tokenizer, n // 6, seed=seed, cache=folder)
    library = tokenizer.encode(library_text()[: 100 * n])
    texts += [library[i : i + ROW] for i in range(0, len(library), ROW)]
    rows = rows_of(texts, seed)
    n_batches = len(rows) // ROWS
    if not n_batches:
        raise ValueError(
            f"--conversations {n} gave less text than one step learns from, {ROWS} rows of {ROW} "
            "tokens; give more."
        )
    return rows[: n_batches * ROWS].view(n_batches, ROWS, ROW), held_out


def _epochs(batches: Tensor, n_steps: int, seed: int) -> Iterator[Tensor]:
    """n_steps batches, in a new random order in each epoch."""
    for start in range(0, n_steps, len(batches)):
        order = random.Random(seed + start).sample(range(len(batches)), len(batches))
        yield from (batches[i] for i in order[: n_steps - start])


def try_student(
    student: Decoder, teacher: Decoder, tried: Sequence[Conversation], n_drafted: int = 8
) -> dict[str, Any]:
    """The student's KL and agreement on the teacher's answers, and what its drafts are worth.

    "each": [KL, agreement] of each conversation, of which the two are means over tokens.
    "drafts": [verified, accepted] draft tokens for each of the first `n_drafted` conversations,
    with 4 draft tokens a pass and 64 greedy tokens.
    """
    apart = [difference(student, teacher, c.prompt + c.answer, first=len(c.prompt)) for c in tried]
    n = [len(c.answer) for c in tried]  # the weights of a mean over tokens
    return {
        "kl": sum(d.kl * k for d, k in zip(apart, n, strict=True)) / sum(n),
        "agreement": sum(d.agreement * k for d, k in zip(apart, n, strict=True)) / sum(n),
        "each": [[d.kl, d.agreement] for d in apart],
        "drafts": drafts(ModelDrafter(student), teacher, tried[:n_drafted], 4),
    }


def drafts(
    drafter: Drafter, teacher: Decoder, tried: Sequence[Conversation], k: int
) -> list[list[int]]:
    """[verified, accepted] draft tokens for 64 greedy tokens of each conversation."""
    results = [speculative_generate(teacher, drafter, c.prompt, 64, k=k) for c in tried]
    return [[result.drafted, result.accepted] for result in results]


def _train_student(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Write the text in bfloat16, then distil in float32; returns the file and its record."""
    start = time.perf_counter()
    teacher, tokenizer = load(dtype="bfloat16")  # faster, and good enough to write text
    assert tokenizer is not None
    n_layers = len(teacher.layers)
    if options.layers > n_layers:  # before hours of writing
        raise ValueError(
            f"--layers is {options.layers}; {teacher.config.name} has {n_layers}, so give at most "
            f"{n_layers}."
        )
    batches, tried = _data(teacher, tokenizer, options)
    written = time.perf_counter()
    teacher, _ = load(dtype="float32")
    student = new_student(teacher, options.layers)
    before = try_student(student, teacher, tried)
    losses = distill(
        teacher, student, _epochs(batches, options.steps, options.seed),
        text_weight=0.0, temperature=1.0, lr=warmup_and_decay(options.lr, options.steps),
        checkpoint=options.folder / "checkpoint.safetensors", total=options.steps,
        autocast=True, known={},
    )  # fmt: skip
    trained = time.perf_counter()
    path = options.folder / "student.safetensors"
    save_student(student, path)
    return path, _run_record(batches, (start, written, trained), losses) | {
        "tried": [[c.prompt, c.answer] for c in tried],
        "before": before,
        "after": try_student(load_student(teacher, path=path), teacher, tried),
    }


def new_student(teacher: Decoder, n_layers: int) -> Decoder:
    """An untrained student: the first and the last layers learn faster than evenly spaced ones."""
    n_last = n_layers // 2
    first_of_last = len(teacher.layers) - n_last
    chosen = [*range(n_layers - n_last), *range(first_of_last, len(teacher.layers))]
    return make_student(teacher, n_layers, chosen=chosen)


def _train_heads(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Medusa heads; returns their file and its record.

    Batches have only two rows, since every head computes logits over the whole vocabulary.
    """
    start = time.perf_counter()
    teacher, tokenizer = load(dtype="float32")
    assert tokenizer is not None
    writer = prepack(teacher) if teacher.device.type == "cpu" else teacher
    batches, tried = _data(writer, tokenizer, options)
    written = time.perf_counter()
    heads = MedusaHeads(options.heads, teacher.config.d_model).to(teacher.device)
    losses = train_heads(
        teacher, heads, _epochs(batches.view(-1, 2, ROW), options.steps, options.seed),
        lr=warmup_and_decay(options.lr, options.steps), total=options.steps,
    )  # fmt: skip
    trained = time.perf_counter()
    path = options.folder / "medusa.safetensors"
    save_heads(heads, path)
    drafter = MedusaDrafter(load_heads(path))
    return path, _run_record(batches, (start, written, trained), losses) | {
        "tried": [[c.prompt, c.answer] for c in tried[:8]],
        "after": {"drafts": drafts(drafter, teacher, tried[:8], options.heads)},
    }


def _run_record(
    batches: Tensor, times: tuple[float, float, float], losses: list[float]
) -> dict[str, Any]:
    """Text, time and loss of a run. times: at its start, after the text, after the training."""
    start, written, trained = times
    return {
        "tokens of text": batches.numel(),
        # Of this run only, which may have found text or a checkpoint of an earlier one.
        "seconds": {"text": round(written - start), "training": round(trained - written)},
        "loss": [round(loss, 4) for loss in losses],
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the text, train on it, save the result with a record of how it was made."""
    parser = Parser(
        prog="python -m minillm.distillation",
        description="Train a student of the default checkpoint on text written by its teacher.",
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the student")
    parser.add_argument(
        "--heads", type=int, default=0, metavar="N", help="train N Medusa heads, not a student"
    )
    parser.add_argument(
        "--conversations", type=int, default=2400, help="conversations that the teacher writes"
    )
    parser.add_argument(
        "--steps", type=int, default=2200,
        help="training steps, each on 8 rows of 256 tokens (with --heads: 2 rows)",
    )  # fmt: skip
    parser.add_argument("--lr", type=float, default=1.5e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/distill"),
        help="for the text, checkpoints and the result",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    return run(lambda: _train(options))


def _check(options: argparse.Namespace) -> None:
    """ValueError for numbers that make no sense, before anything is loaded or written."""
    for name in ("layers", "conversations", "steps"):
        check_whole(f"--{name}", getattr(options, name))
    for name in ("heads", "seed"):
        check_whole(f"--{name}", getattr(options, name), least=0)
    if not 0 < options.lr < math.inf:
        raise ValueError(f"--lr is {options.lr}; it must be a positive number.")


def _train(options: argparse.Namespace) -> None:
    _check(options)
    path, made = (_train_heads if options.heads else _train_student)(options)
    record = {
        "settings": {name: value for name, value in vars(options).items() if name != "folder"},
        "hardware": cpu_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    } | made
    path.with_suffix(".json").write_text(json.dumps(record) + "\n")
    print(f"{record['tokens of text']:,} tokens of text")
    print(f"before: {record.get('before')}\nafter: {record['after']}\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
