"""Training Medusa heads, saving and loading them.

Source: Cai et al. 2024 (Medusa), sections 2.1 and 2.2.1: the heads learn with the model frozen.
Cost: one forward pass of the target per batch, and one product with its head per Medusa head.
The packaged heads are for the default checkpoint, in int8. `python -m minillm.distillation --heads
3` trained them; `data/medusa.json` has the settings.
Not here: training the model together with the heads (Medusa-2).
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minillm.model import Decoder
from minillm.quantization.grid import QuantizedMatrix, to_int8
from minillm.speculation.medusa import MedusaHeads, check_width
from minillm.tools.checks import brief
from minillm.tools.folders import PACKAGE_DATA
from minillm.training import fit, save_whole

PACKAGED_HEADS = PACKAGE_DATA / "medusa.safetensors"
DECAY = 0.8
"""Head i counts DECAY^i in the loss (Cai et al. 2024, section 2.2.1)."""


def train_heads(
    target: Decoder,
    heads: MedusaHeads,
    batches: Iterable[Tensor],
    *,
    lr: float | Callable[[int], float],
    total: int | None = None,
    autocast: bool = False,
) -> list[float]:
    """Train the heads in place on token ids (B, T); returns the loss before each step.

    The target is frozen. T must be at least the number of heads + 2. lr, total and autocast are
    those of `training.fit`. Raises ValueError for heads of another width, and for rows that are too
    short.
    """
    check_width(heads, target)
    both = nn.ModuleList([target, heads])  # `fit` freezes all of it but heads.weight
    loss = partial(_loss, target, heads)
    return fit(both, [heads.weight], batches, loss, lr=lr, total=total, autocast=autocast)


def _loss(target: Decoder, heads: MedusaHeads, tokens: Tensor) -> Tensor:
    """Σ DECAY^i · cross-entropy of head i, on token ids (B, T) (Cai et al. 2024, section 2.2.1)."""
    n, n_tokens = len(heads.weight), tokens.shape[1]
    if n_tokens < n + 2:
        raise ValueError(
            f"Rows of {n_tokens} tokens are too short for {n} heads; give at least {n + 2}."
        )
    with torch.no_grad():
        h = target.hidden(tokens[:, :-2])  # (B, T - 2, C)
    states = heads(h)  # (B, T - 2, n, C)
    total = states.new_zeros(())
    for i in range(n):  # head i drafts token t + 2 + i from place t
        logits = target.head(states[:, : n_tokens - 2 - i, i]).flatten(0, 1)  # (B (T - 2 - i), V)
        total = total + DECAY**i * F.cross_entropy(logits.float(), tokens[:, 2 + i :].flatten())
    return total


def save_heads(heads: MedusaHeads, path: Path) -> None:
    """Write the matrices in int8, with one scale per row."""
    matrices = to_int8(heads.weight.detach().flatten(0, 1))
    save_whole({"q": matrices.q, "scale": matrices.scale}, path, {})


def load_heads(path: Path = PACKAGED_HEADS) -> MedusaHeads:
    """The trained heads, or those in another file from `save_heads`.

    Raises FileNotFoundError or ValueError for a file that is missing or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; train heads with python -m minillm.distillation --heads 3."
        )
    try:
        with safe_open(path, "pt") as file:
            q, scale = file.get_tensor("q"), file.get_tensor("scale")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({brief(str(error))}); fetch it or train it again."
        ) from error
    numbers = q.dtype == torch.int8 and scale.is_floating_point() and bool(scale.isfinite().all())
    d_model = q.shape[-1] if q.dim() == 2 and numbers else 0  # q: (n C, C), one head after another
    if not d_model or len(q) % d_model or not len(q) or scale.shape != q.shape[:1]:
        raise ValueError(
            f"{path} holds {q.dtype} matrices of shape {tuple(q.shape)} with scales "
            f"{tuple(scale.shape)}, which are not heads in int8; train them again."
        )
    # Multiplied in float32 or bfloat16, so int8 saves room in the file only.
    heads = MedusaHeads(len(q) // d_model, d_model).requires_grad_(False)
    heads.weight.copy_(QuantizedMatrix(q, scale).dequantized().view_as(heads.weight))
    return heads
