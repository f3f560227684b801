"""Distillation: a small model learns a large one's habits.

    python -m minillm.distill --layers 4 --steps 2200

Sources: Hinton et al. 2015, section 2 (soft targets, temperature); Kim and Rush 2016, section 3.2
(learning from text that the teacher wrote); Romero et al. 2015 (FitNets: inner activations too).
Cost: a forward pass of the teacher and three of the student for each token.

A text says which token came. A teacher says how likely each of all tokens was: that "cat" could
have been "dog" but not "of". With p and q the teacher's and the student's distributions, both
softened by a temperature T,

    loss = α · cross entropy of the text + (1 - α) · T² · KL(p ‖ q) + states · mean (h_t - h_s)²

T² keeps the gradients of the soft targets as large as at T = 1; h are the last normalized states.

The command makes a student of the default checkpoint that is worth drafting with, or Medusa heads
(`--heads 3`). The teacher writes the text (`minillm.teacher_text`), the student learns its
distributions on it (α is 0), and everything is kept in a folder, so that the command goes on after
an interrupt.
"""

import argparse
import datetime
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.checks import brief
from minillm.drafters import Drafter, ModelDrafter
from minillm.evaluate import difference
from minillm.measure import cpu_name
from minillm.medusa import MedusaDrafter, MedusaHeads, load_heads, save_heads, train_heads
from minillm.model import Decoder
from minillm.prepack import prepack
from minillm.speculative import speculative_generate
from minillm.student import load_student, make_student, save_student
from minillm.teacher_text import Conversation, continued_code, conversations, library_text
from minillm.tokenizer import Tokenizer
from minillm.training import fit, warmup_and_decay
from minillm.weights import load

HELD_OUT = 1_000_000
"""Added to the seed for conversations that the student is tried on and never trained on."""
ROW, ROWS = 257, 8
"""Tokens in a row, and rows in a batch."""


def distillation_loss(
    teacher: Decoder,
    student: Decoder,
    *,
    alpha: float,
    temperature: float,
    states: float = 0.0,
    remember: bool = False,
) -> Callable[[Tensor], Tensor]:
    """The loss above as a function of a batch of token ids (B, T), T at least 2.

    remember: keep the teacher's states of every batch, in bfloat16, for the next time it comes:
    2 C bytes a token.
    """
    known: dict[bytes, Tensor] = {}

    def teacher_states(row: Tensor) -> Tensor:
        if not remember:
            return teacher.hidden(row)
        key = row.cpu().numpy().tobytes()
        if key not in known:
            known[key] = teacher.hidden(row).bfloat16()
        return known[key].to(teacher.dtype)

    def loss(tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        mine = student.hidden(inputs)
        logits = student.head(mine).flatten(0, 1).float()  # (B (T - 1), V)
        total = alpha * F.cross_entropy(logits, targets) if alpha else logits.new_zeros(())
        if alpha < 1 or states:
            with torch.no_grad():
                theirs = teacher_states(inputs)
                soft = (teacher.head(theirs).flatten(0, 1).float() / temperature).softmax(-1)
            if alpha < 1:
                q = (logits / temperature).log_softmax(-1)
                kl = F.kl_div(q, soft, reduction="batchmean")
                total = total + (1 - alpha) * temperature**2 * kl
            if states:
                total = total + states * F.mse_loss(mine.float(), theirs.float())
        return total

    return loss


def distill(
    teacher: Decoder,
    student: Decoder,
    batches: Iterable[Tensor],
    *,
    alpha: float,
    temperature: float,
    lr: float | Callable[[int], float],
    states: float = 0.0,
    checkpoint: Path | None = None,
    total: int | None = None,
    autocast: bool = False,
    remember: bool = False,
) -> list[float]:
    """Train `student` in place on batches of token ids (B, T); returns the loss before each step.

    alpha: the share of the text's own loss, from 0 to 1. temperature above 0. states: the weight of
    the difference of the last states, for models of equal width. What the student shares with the
    teacher stays as it is. remember: as in `distillation_loss`. The rest as in `training.fit`.
    """
    for name, value, least, most in (
        ("alpha", alpha, 0, 1), ("temperature", temperature, 1e-3, 1e3), ("states", states, 0, 1e6)
    ):  # fmt: skip
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(f"{name} is {brief(value)}; give a number from {least} to {most}.")
    if student.config.vocab_size != teacher.config.vocab_size:
        raise ValueError(
            f"The student has {student.config.vocab_size} token ids and the teacher "
            f"{teacher.config.vocab_size}; both must have the same vocabulary."
        )
    if states and student.config.d_model != teacher.config.d_model:
        raise ValueError(
            f"The student is {student.config.d_model} wide and the teacher "
            f"{teacher.config.d_model}; leave states at 0."
        )
    theirs = {id(p) for p in teacher.parameters()}
    learned = [p for p in student.parameters() if id(p) not in theirs]
    loss = distillation_loss(
        teacher, student, alpha=alpha, temperature=temperature, states=states, remember=remember
    )
    options = {"checkpoint": checkpoint, "total": total, "autocast": autocast}
    return fit(student, learned, batches, loss, lr=lr, **options)


def rows_of(texts: Sequence[Sequence[int]], seed: int) -> Tensor:
    """The texts in random order, one after another, cut into rows (N, ROW)."""
    order = random.Random(seed).sample(list(texts), len(texts))
    ids = [i for text in order for i in text]
    n = len(ids) // ROW
    return torch.tensor(ids[: n * ROW]).view(n, ROW)


def _data(
    teacher: Decoder, tokenizer: Tokenizer, options: argparse.Namespace
) -> tuple[Tensor, list[Conversation]]:
    """Batches (N, ROWS, ROW), and some conversations that are held out."""
    folder, seed, n = options.folder, options.seed, options.conversations
    held_out = conversations(teacher, tokenizer, 32, seed=seed + HELD_OUT, cache=folder / "tried")
    chat = conversations(teacher, tokenizer, n, seed=seed, cache=folder)
    texts = [conversation.prompt + conversation.answer for conversation in chat]
    texts += continued_code(teacher, tokenizer, n // 6, seed=seed, cache=folder)
    library = tokenizer.encode(library_text()[: 100 * n])
    texts += [library[i : i + ROW] for i in range(0, len(library), ROW)]
    rows = rows_of(texts, seed)
    n_batches = len(rows) // ROWS
    return rows[: n_batches * ROWS].view(n_batches, ROWS, ROW), held_out


def _epochs(batches: Tensor, n_steps: int, seed: int) -> Iterator[Tensor]:
    """So many batches, in another order each time all of them have come."""
    for start in range(0, n_steps, len(batches)):
        order = random.Random(seed + start).sample(range(len(batches)), len(batches))
        yield from (batches[i] for i in order[: n_steps - start])


def try_student(
    student: Decoder, teacher: Decoder, tried: Sequence[Conversation], n_drafted: int = 8
) -> dict[str, Any]:
    """The student's KL and agreement on the teacher's answers, and what it drafts is worth.

    "drafts": [verified, accepted] guesses for each of the first `n_drafted` conversations, with 4
    guesses a pass and 64 greedy tokens.
    """
    apart = [difference(student, teacher, c.prompt + c.answer, first=len(c.prompt)) for c in tried]
    n = [len(c.answer) for c in tried]
    drafter = ModelDrafter(student)
    return {
        "kl": sum(d.kl * k for d, k in zip(apart, n, strict=True)) / sum(n),
        "agreement": sum(d.agreement * k for d, k in zip(apart, n, strict=True)) / sum(n),
        "drafts": drafts(drafter, teacher, tried[:n_drafted], 4),
    }


def drafts(
    drafter: Drafter, teacher: Decoder, tried: Sequence[Conversation], k: int
) -> list[list[int]]:
    """[verified, accepted] guesses of 64 greedy tokens in each conversation."""
    results = [speculative_generate(teacher, drafter, c.prompt, 64, k=k) for c in tried]
    return [[result.drafted, result.accepted] for result in results]


def _train_student(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    start = time.perf_counter()
    teacher, tokenizer = load(dtype="bfloat16")
    assert tokenizer is not None
    batches, tried = _data(teacher, tokenizer, options)
    written = time.perf_counter()
    teacher, _ = load(dtype="float32")
    # The first and the last layers learn faster than evenly chosen ones.
    last = len(teacher.layers) - options.layers // 2
    chosen = [*range(options.layers - options.layers // 2), *range(last, len(teacher.layers))]
    student = make_student(teacher, options.layers, chosen=chosen)
    before = try_student(student, teacher, tried)
    losses = distill(
        teacher, student, _epochs(batches, options.steps, options.seed),
        alpha=0.0, temperature=1.0, lr=warmup_and_decay(options.lr, options.steps),
        checkpoint=options.folder / "checkpoint.safetensors", total=options.steps,
        autocast=True, remember=True,
    )  # fmt: skip
    trained = time.perf_counter()
    path = options.folder / "student.safetensors"
    save_student(student, path)
    return path, {
        "tokens of text": batches.numel(),
        # Of this run: less if parts of the text and of the training were there.
        "seconds": {"text": round(written - start), "training": round(trained - written)},
        "loss": [round(loss, 4) for loss in losses],
        "tried": [[c.prompt, c.answer] for c in tried],
        "before": before,
        "after": try_student(load_student(teacher, path=path), teacher, tried),
    }


def _train_heads(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Two rows at a time: each is scored over the whole vocabulary by every head."""
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
    return path, {
        "tokens of text": batches.numel(),
        "seconds": {"text": round(written - start), "training": round(trained - written)},
        "loss": [round(loss, 4) for loss in losses],
        "tried": [[c.prompt, c.answer] for c in tried[:8]],
        "after": {"drafts": drafts(drafter, teacher, tried[:8], options.heads)},
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the text, train on it, save the result with a record of how it was made."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm.distill",
        description="Train a student of the default checkpoint on text that its teacher writes.",
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--heads", type=int, default=0, help="so many Medusa heads instead of a student"
    )
    parser.add_argument("--conversations", type=int, default=2400, help="questions to be asked")
    parser.add_argument(
        "--steps", type=int, default=2200, help="of 8 rows of 256 tokens; 2 rows for heads"
    )
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/distill"))
    options = parser.parse_args(arguments)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
