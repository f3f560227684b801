"""Distillation: a small model learns a large one's habits.

Sources: Hinton et al. 2015, section 2 (soft targets, temperature); Kim and Rush 2016, section 3.2
(learning from text that the teacher wrote); Romero et al. 2015 (FitNets: inner activations too);
Sanh et al. 2019 (DistilBERT: a student made of the teacher's own layers).
Cost: a forward pass of the teacher and three of the student for each token.

A text says which token came. A teacher says how likely each of all tokens was: that "cat" could
have been "dog" but not "of". With p and q the teacher's and the student's distributions, both
softened by a temperature T,

    loss = α · cross entropy of the text + (1 - α) · T² · KL(p ‖ q) + states · mean (h_t - h_s)²

T² keeps the gradients of the soft targets as large as at T = 1; h are the last normalized states.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from minillm.checks import brief, check_whole
from minillm.engine import Engine
from minillm.engine_config import EngineConfig
from minillm.model import Decoder, check_plain
from minillm.sampling import Sampling
from minillm.training import fit, save_whole


def make_student(teacher: Decoder, n_layers: int) -> Decoder:
    """A model of `n_layers` copies of the teacher's layers, evenly chosen, the last one included.

    The embedding and the head are the teacher's own, shared and not copied.
    Raises ValueError for a number of layers that the teacher does not have, and for a teacher whose
    matrices are not plain.
    """
    check_whole("n_layers", n_layers)
    L = len(teacher.layers)
    if n_layers > L:
        raise ValueError(
            f"n_layers is {n_layers}; {teacher.config.name} has {L}, so give at most {L}."
        )
    check_plain(teacher, "make a student of")
    shared = {id(p): p for p in (teacher.embed.weight, teacher.head.weight)}
    config = dataclasses.replace(teacher.config, n_layers=n_layers)
    with torch.device("meta"):
        student = Decoder(config)
    student.embed, student.head = (
        copy.deepcopy(part, dict(shared)) for part in (teacher.embed, teacher.head)
    )
    student.norm = copy.deepcopy(teacher.norm)
    # The last layer of each of n equal parts.
    chosen = [round((i + 1) * L / n_layers) - 1 for i in range(n_layers)]
    student.layers = torch.nn.ModuleList(copy.deepcopy(teacher.layers[i]) for i in chosen)
    for layer in student.layers:
        layer.config = config
    return student.eval()


def distillation_loss(
    teacher: Decoder,
    student: Decoder,
    *,
    alpha: float,
    temperature: float,
    states: float = 0.0,
) -> Callable[[Tensor], Tensor]:
    """The loss above as a function of a batch of token ids (B, T), T at least 2."""

    def loss(tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        mine = student.hidden(inputs)
        logits = student.head(mine).flatten(0, 1).float()  # (B (T - 1), V)
        total = alpha * F.cross_entropy(logits, targets) if alpha else logits.new_zeros(())
        if alpha < 1 or states:
            with torch.no_grad():
                theirs = teacher.hidden(inputs)
                soft = (teacher.head(theirs).flatten(0, 1).float() / temperature).log_softmax(-1)
            if alpha < 1:
                q = (logits / temperature).log_softmax(-1)
                kl = F.kl_div(q, soft, log_target=True, reduction="batchmean")
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
) -> list[float]:
    """Train `student` in place on batches of token ids (B, T); returns the loss before each step.

    alpha: the share of the text's own loss, from 0 to 1. temperature above 0. states: the weight of
    the difference of the last states, for models of equal width. What the student shares with the
    teacher stays as it is. The rest as in `training.fit`.
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
    loss = distillation_loss(teacher, student, alpha=alpha, temperature=temperature, states=states)
    options = {"checkpoint": checkpoint, "total": total, "autocast": autocast}
    return fit(student, learned, batches, loss, lr=lr, **options)


def teacher_text(
    teacher: Decoder,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    *,
    temperature: float = 1.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    cache: Path | None = None,
) -> list[list[int]]:
    """Each prompt with the teacher's own continuation: data for sequence-level distillation.

    Sampled by the batched engine, request i with seed + i. cache: a .safetensors file that is read
    if it is there, and written otherwise. ValueError for no prompts, for a cache made of other
    prompts or with other settings, and for a teacher that fails.
    """
    if not prompts:
        raise ValueError("prompts is empty; give at least one.")
    settings = {"n_new": str(n_new), "temperature": str(temperature), "seed": str(seed)}
    if cache is not None and cache.exists():
        return _cached(cache, prompts, settings)
    longest = max(map(len, prompts)) + n_new
    at_once = min(32, len(prompts))
    config = EngineConfig(n_blocks=at_once * -(-longest // 16) + 1, max_seqs=at_once)
    engine, stops = Engine(teacher, config), list(stop_ids)
    numbers = [
        engine.submit(p, n_new, sampling=Sampling(temperature, seed=seed + i), stop_ids=stops)
        for i, p in enumerate(prompts)
    ]
    done = engine.run()
    if errors := [done[n].error for n in numbers if done[n].error]:
        raise ValueError(f"The teacher failed at {len(errors)} prompts: {errors[0]}")
    texts = [[*p, *done[n].tokens] for p, n in zip(prompts, numbers, strict=True)]
    if cache is not None:
        ids = torch.tensor([i for text in texts for i in text], dtype=torch.int32)
        lengths = torch.tensor([len(text) for text in texts])
        save_whole({"ids": ids, "lengths": lengths}, cache, settings)
    return texts


def _cached(
    path: Path, prompts: Sequence[Sequence[int]], settings: dict[str, str]
) -> list[list[int]]:
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in ("ids", "lengths")}
        same = file.metadata() == settings
    texts = [row.tolist() for row in stored["ids"].split(stored["lengths"].tolist())]
    begin = len(texts) == len(prompts) and all(
        text[: len(p)] == list(p) for text, p in zip(texts, prompts, strict=True)
    )
    if not (same and begin):
        raise ValueError(f"{path} was made of other prompts or with other settings; delete it.")
    return texts
