"""Medusa: extra heads that draft the tokens after the next, from a state that is there anyway.

Source: Cai et al. 2024 (Medusa), section 2.1. Blockwise parallel decoding (Stern et al. 2018,
section 3) is the ancestor.
Cost: C² parameters a head, and one product of k rows with the target's own head for k draft tokens.
No second model, no second cache.

The model's head turns the state h of place t into token t + 1. Head i, counted from 0, drafts token
t + 2 + i from the same h:

    logits_i = head(h + SiLU(W_i h))

A new W_i is 0, so training starts from what the model itself says. The draft tokens form one chain,
each the greedy one of its head. Unlike the paper's, the heads share the target's output matrix.
Not here: training the heads (`minillm.speculation.medusa_heads`); several draft tokens a head (the
paper's tree).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import Decoder
from minillm.sampling import Sampling, greedy
from minillm.speculation.drafters import Draft, Drafter
from minillm.tools.checks import check_token, check_whole


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


def check_width(heads: MedusaHeads, target: Decoder) -> None:
    """ValueError for heads made for a target of another width."""
    width = heads.weight.shape[1]
    if width != target.config.d_model:
        raise ValueError(
            f"The heads are for states of {width} numbers and the target's have "
            f"{target.config.d_model}; train heads for this target."
        )


class MedusaDrafter(Drafter):
    """Heads that were trained on the target, or on one that it is a copy of in fewer bits."""

    uses_states = True

    def __init__(self, heads: MedusaHeads):
        self.heads = heads

    def start(self, target: Decoder, max_len: int, sampling: Sampling | None) -> "MedusaSession":
        check_width(self.heads, target)
        return MedusaSession(self.heads, target)


class MedusaSession:
    """Keeps nothing of the sequence: all that the heads need is the target's hidden state."""

    def __init__(self, heads: MedusaHeads, target: Decoder):
        self._heads, self._target = heads, target

    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], hidden: Tensor | None = None
    ) -> Draft:
        return Draft() if hidden is None else Draft(self.chains(hidden[None], k)[0])

    @torch.inference_mode()
    def chains(self, hidden: Tensor, k: int) -> list[list[int]]:
        """At most k draft tokens after each hidden state (n, C)."""
        weight = self._heads.weight
        states = self._heads(hidden.to(weight.device, weight.dtype), k)  # (n, k, C)
        logits = self._target.head(states.to(hidden.device, hidden.dtype))  # (n, k, V)
        return [
            [check_token(token, "drafting head") for token in chain]
            for chain in greedy(logits).tolist()
        ]
