"""From logits to the next token: greedy, temperature, top-k, top-p.

Sources: Fan et al. 2018, section 5 (top-k); Holtzman et al. 2020, section 3.1 (nucleus, or top-p).
Cost: O(V) a token, O(V log V) with top-p; the cost of the model's forward pass hides it.
Order as in Hugging Face transformers: temperature, then top-k, then top-p on what is left.

A token is drawn by inversion: one uniform number u in [0, 1) picks the first token at which the
cumulated probabilities exceed u. The t-th token of a request uses the t-th number of the request's
own stream, so its tokens do not depend on the other rows of the batch.
Not here: repetition penalties, beam search, min-p.
"""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.tools.checks import brief, check_whole

_NUCLEUS = 256


def _is_finite(value: object) -> bool:
    """Whether `value` is a number (not a bool) that a float can hold."""
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


@dataclass(frozen=True)
class Sampling:
    """How to draw a token.

    temperature 0 is greedy; top_k keeps the k likeliest tokens; top_p keeps the smallest set of
    likeliest tokens whose probabilities reach p. The same seed gives the same draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_finite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature is {brief(self.temperature)}; it must be 0 (greedy) or a positive "
                "number."
            )
        if self.top_k is not None:
            check_whole("top_k", self.top_k)
        if self.top_p is not None and not (_is_finite(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(
                f"top_p is {brief(self.top_p)}; it must be above 0 and at most 1, or None."
            )
        if self.seed is not None:
            check_whole("seed", self.seed, least=0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def stream(self) -> random.Random:
        """This request's stream of numbers in [0, 1): the t-th `random()` draws the t-th token.

        With a seed always the same ones, else different ones every time.
        """
        return random.Random(self.seed)

    def uniforms(self, n: int) -> array:
        """The first `n` numbers of the stream."""
        stream = self.stream()
        return array("d", (stream.random() for _ in range(n)))


def check_sampling(sampling: object) -> None:
    """TypeError for what is neither a Sampling nor None."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling is {brief(sampling)}; give a minillm.Sampling, or None for greedy."
        )


def probabilities(logits: Tensor, sampling: Sampling | Sequence[Sampling | None] | None) -> Tensor:
    """The distributions (…, V) in float32 from which tokens are drawn, for logits (…, V).

    sampling: one for all rows, or one for each. None or temperature 0 puts all probability on the
    largest logit. A row that holds NaN or +∞ gives NaN.
    """
    shape = logits.shape
    logits = logits.float().reshape(-1, shape[-1])  # (N, V)
    one = sampling is None or isinstance(sampling, Sampling)
    each = [sampling] * len(logits) if one else list(sampling)
    greedy_rows = [i for i, s in enumerate(each) if s is None or s.greedy]
    each = [s or Sampling() for s in each]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    # Subtracting the maximum first keeps tiny temperatures from overflowing. Beyond these limits,
    # which are greedy and uniform already, float32 would make the temperature 0 or infinite.
    temperature = column([min(max(s.temperature, 1e-30), 1e30) for s in each])
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    cut = [i for i, s in enumerate(each) if s.top_k is not None and s.top_k < shape[-1]]
    if cut:
        k = torch.tensor([each[i].top_k for i in cut], device=logits.device)[:, None]
        largest = scaled[cut].topk(int(k.max()), dim=-1).values
        kth = largest.gather(-1, k - 1)
        scaled[cut] = scaled[cut].masked_fill(scaled[cut] < kth, -torch.inf)
    probs = scaled.softmax(-1)
    nucleus = [i for i, s in enumerate(each) if s.top_p is not None and s.top_p < 1]
    if nucleus:
        probs[nucleus] = _top_p(probs[nucleus], column([each[i].top_p for i in nucleus]))
    if greedy_rows:
        best = logits[greedy_rows].argmax(-1, keepdim=True)
        one_hot = torch.zeros_like(probs[greedy_rows]).scatter(-1, best, 1.0)
        probs[greedy_rows] = one_hot + 0 * probs[greedy_rows]  # NaN stays NaN
    return probs.view(shape)


def _top_p(probs: Tensor, p: Tensor) -> Tensor:
    """Keep the likeliest tokens of each row (N, V) whose probabilities reach p (N, 1)."""
    # A few hundred tokens nearly always reach p; sorting all V takes ten times as long.
    ordered = probs.topk(min(_NUCLEUS, probs.shape[-1]), dim=-1).values
    if bool((ordered.sum(-1, keepdim=True) < p).any()):
        ordered = probs.sort(dim=-1, descending=True).values
    cumulated = ordered.cumsum(-1)
    before = cumulated - ordered  # probability of the likelier tokens
    # The likeliest stays in any case: nothing is before it. (In a row of NaN nothing compares.)
    n_kept = ((before <= 0) | (before < p)).sum(-1, keepdim=True).clamp(min=1)
    least = ordered.gather(-1, n_kept - 1)
    kept = probs >= least
    if bool((kept.sum(-1, keepdim=True) > n_kept).any()):  # of equals, the first ones stay
        equal = probs == least
        n_equal = n_kept - (probs > least).sum(-1, keepdim=True)
        kept &= ~equal | (equal.cumsum(-1) <= n_equal)
    # Not probs.sum(-1): PyTorch cuts the sum of one long row in parts for its threads, and that of
    # several rows not, so that the last bit would depend on the other rows.
    return probs.where(kept, 0.0) / cumulated.gather(-1, n_kept - 1)


def draw(probs: Tensor, uniforms: Sequence[float]) -> list[int]:
    """One token of each row of probs (N, V), by inversion of the cumulated probabilities.

    uniforms: a number in [0, 1) for each row. Gives -1 for a row that is not numbers.
    """
    cumulated = probs.double().cumsum(-1)
    total = cumulated[:, -1:]
    u = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None]
    # The first token that reaches beyond u: one of probability 0 never does so first.
    tokens = torch.searchsorted(cumulated, u * total, right=True)
    return tokens.where(total > 0, -1)[:, 0].tolist()


class TokenLogprobs(NamedTuple):
    """A token with its natural log-probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], n_top: int) -> list[TokenLogprobs]:
    """The log-probability of one token for each row of logits (N, V), and its n_top likeliest.

    They are the model's own: temperature, top-k and top-p change nothing. In float32.
    """
    logprobs = logits.float().log_softmax(-1)  # (N, V)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]  # (N, 1)
    own = logprobs.gather(-1, chosen.clamp(min=0))[:, 0].tolist()  # -1 stands for no numbers
    top = logprobs.topk(min(n_top, logprobs.shape[-1]), dim=-1)
    pairs = (
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    return [TokenLogprobs(*row) for row in zip(tokens, own, pairs, strict=True)]


def greedy(logits: Tensor) -> Tensor:
    """The place (…) of the largest of logits (…, V), the first among equals.

    -1 where the largest is not a number: NaN, or infinite.
    """
    # On a CPU `max` finds it three to four times as fast as `argmax`.
    largest, tokens = logits.max(-1)
    return tokens.where(largest.isfinite(), -1)


def next_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling | None],
    uniforms: Sequence[float],
    best: Sequence[int] | None = None,
) -> list[int]:
    """One token for each row of logits (N, V), greedy or drawn; -1 for a row that is not numbers.

    samplings and uniforms: one for each row. best: `greedy(logits)`, if it is known already.
    """
    tokens = list(greedy(logits).tolist() if best is None else best)
    drawn = [i for i, s in enumerate(samplings) if s is not None and not s.greedy]
    if drawn:
        rows = logits if len(drawn) == len(tokens) else logits[drawn]
        probs = probabilities(rows, [samplings[i] for i in drawn])
        for i, token in zip(drawn, draw(probs, [uniforms[i] for i in drawn]), strict=True):
            tokens[i] = token
    return tokens
