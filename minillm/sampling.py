"""From logits to the next token: greedy, temperature, top-k, top-p.

Sources: Fan et al. 2018, section 5 (top-k); Holtzman et al. 2020, section 3.1 (nucleus, or top-p).
Cost: O(V) a token, O(V log V) with top-p; the cost of the model's forward pass hides it.
Order as in Hugging Face transformers: temperature, then top-k, then top-p on what is left.
Not here: repetition penalties, beam search, min-p.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """How to draw a token. temperature 0 is greedy; top_k keeps the k likeliest tokens; top_p keeps the smallest
    set of likeliest tokens whose probabilities reach p. The same seed gives the same draws."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature!r}; it must be 0 (greedy) or a positive number.")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k!r}; it must be a whole number, 1 or more, or None.")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1, or None.")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**32):
            raise ValueError(
                f"seed is {self.seed!r}; it must be a whole number from 0 to 2**32 - 1 (all that PyTorch's CPU generator uses), or None."
            )

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A random generator of its own for one request: seeded with `seed`, or differently every time."""
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def probabilities(logits: Tensor, sampling: Sampling | None) -> Tensor:
    """The distribution (…, V) in float32 that `sample` draws from. None or temperature 0: all on the largest logit."""
    logits = logits.float()
    if sampling is None or sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Subtracting the maximum first keeps tiny temperatures from overflowing. Beyond these limits, which are greedy and
    # uniform already, float32 would make the temperature 0 or infinite, and the quotients NaN.
    logits = (logits - logits.amax(-1, keepdim=True)) / min(max(sampling.temperature, 1e-30), 1e30)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # probability of the likelier tokens
        ordered = ordered.masked_fill((before > 0) & (before >= sampling.top_p), 0.0)  # the first stays: nothing is before it
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def sample(logits: Tensor, sampling: Sampling | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Draw token ids (…) from logits (…, V). Greedy when `sampling` is None or its temperature is 0."""
    if sampling is None or sampling.temperature == 0:
        return logits.argmax(-1)
    probs = probabilities(logits, sampling)
    return torch.multinomial(probs.view(-1, probs.shape[-1]), 1, generator=generator).view(probs.shape[:-1])
