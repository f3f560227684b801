"""Medusa: extra heads that guess the tokens after the next, from a state that is there anyway.

Source: Cai et al. 2024 (Medusa), section 2.1 (heads, and training them with the model frozen).
Blockwise parallel decoding (Stern et al. 2018, section 3) is the ancestor.
Cost: C² parameters a head, and one product of k rows with the target's own head for k guesses. No
second model, no second cache.

The model's head turns the state h of place t into token t + 1. Head i, counted from 0, guesses
token t + 2 + i from the same h:

    logits_i = head(h + SiLU(W_i h))

A new W_i is 0, so training starts from what the model itself says. The guesses form one chain, each
the likeliest of its head. Unlike the paper's, the heads share the target's output matrix.
The packaged heads are for the default checkpoint, in int8; `python -m minillm.distill --heads 3`
trained them, and `data/medusa.json` says how.
Not here: several guesses a head (the paper's tree), training the model along (Medusa-2).
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minillm.checks import brief, check_whole
from minillm.drafters import Draft
from minillm.grid import Grid, to_int8
from minillm.model import Decoder
from minillm.request import Request
from minillm.sampling import Sampling, likeliest
from minillm.training import fit, save_whole

PACKAGED_HEADS = Path(__file__).parent / "data" / "medusa.safetensors"
DECAY = 0.8
"""How much less each further head counts in the loss (Cai et al. 2024, section 2.2.1)."""


class MedusaHeads(nn.Module):
    """n heads for a model of width C."""

    def __init__(self, n: int, d_model: int):
        super().__init__()
        check_whole("n", n)
        check_whole("d_model", d_model)
        self.weight = nn.Parameter(torch.zeros(n, d_model, d_model))

    def forward(self, h: Tensor, k: int | None = None) -> Tensor:
        """States (…, C) to those of the first k heads (…, k, C), or of all."""
        weight = self.weight[:k]
        turned = F.linear(h, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
        return h[..., None, :] + F.silu(turned)


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

    The target is frozen. T must be more than the number of heads + 1. The rest as in
    `training.fit`. ValueError for heads of another width, and for rows that are too short.
    """
    _check_width(heads, target)
    n = len(heads.weight)

    def loss(tokens: Tensor) -> Tensor:
        if tokens.shape[1] < n + 2:
            raise ValueError(
                f"Rows of {tokens.shape[1]} tokens are too short for {n} heads; give at least "
                f"{n + 2}."
            )
        with torch.no_grad():
            h = target.hidden(tokens[:, :-2])  # (B, T - 2, C)
        states = heads(h)  # (B, T - 2, n, C)
        total = states.new_zeros(())
        for i in range(n):
            logits = target.head(states[:, : tokens.shape[1] - 2 - i, i]).flatten(0, 1)
            total = total + DECAY**i * F.cross_entropy(logits.float(), tokens[:, 2 + i :].flatten())
        return total

    both = nn.ModuleList([target, heads])  # so that all but the heads is frozen
    return fit(both, [heads.weight], batches, loss, lr=lr, total=total, autocast=autocast)


def save_heads(heads: MedusaHeads, path: Path) -> None:
    """Write the matrices in int8, with a scale for each row."""
    matrices = to_int8(heads.weight.detach().flatten(0, 1))
    save_whole({"q": matrices.q, "scale": matrices.scale}, path, {})


def load_heads(path: Path = PACKAGED_HEADS) -> MedusaHeads:
    """The trained heads, or those of another file of `save_heads`.

    Raises FileNotFoundError or ValueError for a file that is missing or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; train heads with python -m minillm.distill --heads 3."
        )
    try:
        with safe_open(path, "pt") as file:
            q, scale = file.get_tensor("q"), file.get_tensor("scale")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({brief(str(error))}); fetch it or train it again."
        ) from error
    numbers = q.dtype == torch.int8 and scale.is_floating_point() and bool(scale.isfinite().all())
    d_model = q.shape[-1] if q.dim() == 2 and numbers else 0
    if not d_model or len(q) % d_model or not len(q) or scale.shape != q.shape[:1]:
        raise ValueError(
            f"{path} holds {q.dtype} matrices of shape {tuple(q.shape)} with scales "
            f"{tuple(scale.shape)}, which are no heads in int8; train them again."
        )
    heads = MedusaHeads(len(q) // d_model, d_model).requires_grad_(False)
    heads.weight.copy_(Grid(q, scale).dequantized().view_as(heads.weight))
    return heads


def _check_width(heads: MedusaHeads, target: Decoder) -> None:
    width = heads.weight.shape[1]
    if width != target.config.d_model:
        raise ValueError(
            f"The heads are for states of {width} numbers and the target's have "
            f"{target.config.d_model}; train heads for this target."
        )


class MedusaDrafter:
    """Heads that were trained on the target, or on one that it is a copy of in fewer bits."""

    uses_states = True  # the engine asks

    def __init__(self, heads: MedusaHeads):
        self.heads = heads

    def start(self, target: Decoder, max_len: int, sampling: Sampling | None) -> "_Guesses":
        _check_width(self.heads, target)
        return _Guesses(self.heads, target)

    def batch(self, target: Decoder, n_blocks: int, block_size: int) -> "_BatchGuesses":
        """Drafts for all requests of an engine, in one product with the target's head."""
        return _BatchGuesses(self.start(target, 1, None))


class _Guesses:
    """Keeps nothing of the sequence: all that the heads need is the target's last state."""

    def __init__(self, heads: MedusaHeads, target: Decoder):
        self._heads, self._target = heads, target

    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], state: Tensor | None = None
    ) -> Draft:
        return Draft() if state is None else Draft(self.after(state[None], k)[0])

    @torch.inference_mode()
    def after(self, states: Tensor, k: int) -> list[list[int]]:
        """The chains of at most k guesses for states (n, C)."""
        weight = self._heads.weight
        turned = self._heads(states.to(weight.device, weight.dtype), k)  # (n, k, C)
        logits = self._target.head(turned.to(states.device, states.dtype))
        return likeliest(logits).tolist()


class _BatchGuesses:
    def __init__(self, guesses: _Guesses):
        self._guesses = guesses

    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        asked = [i for i, r in enumerate(requests) if ks[i] and r.state is not None]
        drafts: list[list[int]] = [[] for _ in requests]
        if asked:
            states = torch.stack([requests[i].state for i in asked])
            chains = self._guesses.after(states, max(ks[i] for i in asked))
            for i, chain in zip(asked, chains, strict=True):
                drafts[i] = chain[: ks[i]]
        return drafts
