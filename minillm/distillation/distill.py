"""Distillation: a small model learns to imitate a large one.

Sources: Hinton et al. 2015, section 2 (soft targets, temperature); Kim and Rush 2016, section 3.2
(learning from text that the teacher wrote); Romero et al. 2015 (FitNets: inner activations too).
Cost: a forward pass of the teacher and three of the student for each token.

A text shows which token came next. A teacher tells how likely every token was: that "cat" could
have been "dog" but not "of". With p and q the teacher's and the student's distributions, both
softened by a temperature τ, and μ the weight of the text,

    loss = μ · cross entropy of the text + (1 - μ) · τ² · KL(p ‖ q) + states · mean (h_t - h_s)²

τ² keeps the gradients of the soft targets as large as at τ = 1; h are the last hidden states,
normalized. `python -m minillm.distillation` is the command that trained the packaged student.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model import Decoder
from minillm.tools.checks import brief
from minillm.training import fit


def distillation_loss(
    teacher: Decoder,
    student: Decoder,
    *,
    text_weight: float,
    temperature: float,
    states: float = 0.0,
    known: dict[bytes, Tensor] | None = None,
) -> Callable[[Tensor], Tensor]:
    """The loss above as a function of a batch of token ids (B, T), T at least 2.

    known: a dictionary that keeps the teacher's hidden states of every batch, in bfloat16, for when
    the batch comes again, in this training or another one. This takes 2 C bytes a token.
    """

    def teacher_states(row: Tensor) -> Tensor:
        if known is None:
            return teacher.hidden(row)
        key = row.cpu().numpy().tobytes()
        if key not in known:
            known[key] = teacher.hidden(row).bfloat16()
        return known[key].to(teacher.dtype)

    def loss(tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        mine = student.hidden(inputs)  # (B, T - 1, C)
        logits = student.head(mine).flatten(0, 1).float()  # (B (T - 1), V)
        total = logits.new_zeros(())
        if text_weight:  # μ · cross entropy of the text
            total = total + text_weight * F.cross_entropy(logits, targets)
        if text_weight < 1 or states:
            with torch.no_grad():
                theirs = teacher_states(inputs)
                p = (teacher.head(theirs).flatten(0, 1).float() / temperature).softmax(-1)
            if text_weight < 1:  # (1 - μ) · τ² · KL(p ‖ q)
                log_q = (logits / temperature).log_softmax(-1)
                kl = F.kl_div(log_q, p, reduction="batchmean")
                total = total + (1 - text_weight) * temperature**2 * kl
            if states:  # states · mean (h_t - h_s)²
                total = total + states * F.mse_loss(mine.float(), theirs.float())
        return total

    return loss


def distill(
    teacher: Decoder,
    student: Decoder,
    batches: Iterable[Tensor],
    *,
    text_weight: float,
    temperature: float,
    lr: float | Callable[[int], float],
    states: float = 0.0,
    checkpoint: Path | None = None,
    total: int | None = None,
    autocast: bool = False,
    known: dict[bytes, Tensor] | None = None,
) -> list[float]:
    """Train `student` in place on batches of token ids (B, T); returns the loss before each step.

    text_weight: that of the text's own loss, from 0 to 1. temperature: above 0. states: the weight
    of the difference between the last hidden states, for models of equal width. Parameters that the
    student shares with the teacher stay as they are. known: as in `distillation_loss`. Other
    arguments as in `training.fit`.
    ValueError for numbers out of range and for models whose vocabularies or widths differ.
    """
    _check(teacher, student, text_weight=text_weight, temperature=temperature, states=states)
    theirs = {id(p) for p in teacher.parameters()}
    learned = [p for p in student.parameters() if id(p) not in theirs]
    loss = distillation_loss(
        teacher, student, text_weight=text_weight, temperature=temperature, states=states,
        known=known,
    )  # fmt: skip
    return fit(
        student, learned, batches, loss, lr=lr, checkpoint=checkpoint, total=total,
        autocast=autocast,
    )  # fmt: skip


def _check(
    teacher: Decoder, student: Decoder, *, text_weight: float, temperature: float, states: float
) -> None:
    """ValueError for numbers out of range and for two models that cannot be compared."""
    for name, value, least, most in (
        ("text_weight", text_weight, 0, 1), ("temperature", temperature, 1e-3, 1e3),
        ("states", states, 0, 1e6),
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
