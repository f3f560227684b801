"""Training: the loss of predicting the next token, and a loop of AdamW steps.

Sources: Loshchilov and Hutter 2019 (AdamW); Ainslie et al. 2023, section 2.1 (uptraining).
Cost: a step takes about three forward passes: 6 FLOPs per parameter and token (Kaplan et al. 2020).
The loop takes any loss: next token, a teacher's (`minillm.distill`), that of extra heads. A long
run writes checkpoints from time to time, and resumes from the last one when started again.
Not here: several devices, gradient accumulation.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from minillm.measure import multiplies_bfloat16
from minillm.model import Decoder


def next_token_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of all tokens of `tokens` (B, T) but the first.

    Each is predicted from those before it; T is at least 2.
    """
    logits = model(tokens[:, :-1])  # (B, T - 1, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def uptrain(model: Decoder, batches: Iterable[Tensor], *, lr: float) -> list[float]:
    """Train `model` in place on batches of token ids (B, T), one AdamW step for each.

    Returns the loss before each step. Ainslie et al. 2023, section 2.1, uptrain a model after its
    heads are merged, for a share α of the original steps. It is ordinary training, so a small model
    can be trained from scratch with it too.
    """
    return fit(model, list(model.parameters()), batches, partial(next_token_loss, model), lr=lr)


def fit(
    model: nn.Module,
    learned: Sequence[nn.Parameter],
    batches: Iterable[Tensor],
    loss: Callable[[Tensor], Tensor],
    *,
    lr: float | Callable[[int], float],
    checkpoint: Path | None = None,
    every: int = 100,
    total: int | None = None,
    autocast: bool = False,
) -> list[float]:
    """One AdamW step on `loss(batch)` for each batch; returns the loss before each step.

    learned: the parameters of `model` that change. lr: a number, or a function from the step, from
    0, to the rate. checkpoint: a .safetensors file, written atomically after `every` steps and at
    the end. If it exists, training resumes after its last step: give the same batches again, and
    the first ones are skipped. total: the number of batches, for a progress bar. autocast: matrix
    products in bfloat16, except on a CPU that would emulate them, many times slower.
    ValueError for a checkpoint of other parameters, and for an empty batch.
    """
    if not learned:
        raise ValueError("There is nothing to learn: no parameter is the model's own.")
    rate = lr if callable(lr) else lambda _: lr
    optimizer = torch.optim.AdamW(learned, lr=rate(0), betas=(0.9, 0.95), weight_decay=0.0)
    device = learned[0].device
    in_bfloat16 = autocast and multiplies_bfloat16(device)
    products = torch.autocast(device.type, torch.bfloat16) if in_bfloat16 else nullcontext()
    with _gradients_only_for(learned, model):
        losses = _resumed(checkpoint, learned, optimizer)
        rest = islice(iter(batches), len(losses), None)  # one loss for each batch done
        bar = tqdm(rest, total=total, initial=len(losses), mininterval=1, disable=total is None)
        for batch in bar:
            if not batch.numel():
                raise ValueError(f"Batch {len(losses)} is empty; give each at least one row.")
            optimizer.param_groups[0]["lr"] = rate(len(losses))
            with products:  # for the forward pass; the backward pass follows its dtypes
                value = loss(batch.to(device))
            _step(value, learned, optimizer)
            losses.append(value.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            if checkpoint is not None and len(losses) % every == 0:
                _save(checkpoint, learned, optimizer, losses)
        if checkpoint is not None and losses:
            _save(checkpoint, learned, optimizer, losses)
    return losses


@contextmanager
def _gradients_only_for(learned: Sequence[nn.Parameter], model: nn.Module) -> Iterator[None]:
    """Gradients for `learned` alone; afterwards none, and all parameters as they were."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        model.requires_grad_(False)
        for p in learned:
            p.requires_grad_(True)
        yield
    finally:
        for p in learned:
            p.grad = None  # gradients take as much memory as the parameters
        for p, required in before:
            p.requires_grad_(required)


def _step(loss: Tensor, learned: Sequence[nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    """Backward pass, gradients clipped to norm 1, update."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(learned, 1.0)
    optimizer.step()


def warmup_and_decay(lr: float, n_steps: int, warmup: float = 0.05) -> Callable[[int], float]:
    """The rate of each step: linear warm-up for a share of the steps, then half a cosine to 0.

    Source: Loshchilov and Hutter 2017 (SGDR), equation 5.
    """
    rising = max(1, round(warmup * n_steps))

    def rate(step: int) -> float:
        if step < rising:
            return lr * (step + 1) / rising
        through = (step - rising) / max(1, n_steps - rising)  # from 0 to 1
        return lr * (1 + math.cos(math.pi * min(1.0, through))) / 2

    return rate


def _save(
    path: Path, learned: Sequence[nn.Parameter], optimizer: torch.optim.AdamW, losses: list[float]
) -> None:
    """Write parameters, AdamW's two moments and the losses."""
    tensors = {}
    for i, p in enumerate(learned):
        state = optimizer.state[p]  # empty if the parameter never had a gradient
        tensors[f"{i}.value"] = p.detach()
        tensors[f"{i}.mean"] = state.get("exp_avg", torch.zeros_like(p))
        tensors[f"{i}.square"] = state.get("exp_avg_sq", torch.zeros_like(p))
    contiguous = {name: t.detach().contiguous().clone() for name, t in tensors.items()}
    save_whole(contiguous, path, {"losses": json.dumps(losses)})


def save_whole(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a .safetensors file atomically: under another name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=metadata)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _resumed(
    path: Path | None, learned: Sequence[nn.Parameter], optimizer: torch.optim.AdamW
) -> list[float]:
    """Restore parameters and moments from the checkpoint, if any; returns the losses so far."""
    if path is None or not path.exists():
        return []
    try:
        opened = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to start again.") from error
    with opened as file:
        losses = json.loads((file.metadata() or {}).get("losses", "[]"))
        # Three tensors for each parameter: value, mean and square, as `_save` wrote them.
        fits = len(file.keys()) == 3 * len(learned) and all(
            tuple(file.get_slice(f"{i}.value").get_shape()) == p.shape
            for i, p in enumerate(learned)
        )
        if not fits:
            raise ValueError(
                f"{path} is a checkpoint of other parameters; give another path, or delete it."
            )
        for i, p in enumerate(learned):
            p.data.copy_(file.get_tensor(f"{i}.value"))
            optimizer.state[p] = {
                "step": torch.tensor(float(len(losses))),
                "exp_avg": file.get_tensor(f"{i}.mean").to(p.device),
                "exp_avg_sq": file.get_tensor(f"{i}.square").to(p.device),
            }
    return losses
