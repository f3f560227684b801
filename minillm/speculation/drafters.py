"""Drafters: they propose the tokens that come next, cheaply enough to be wrong.

Sources: Leviathan et al. 2023, section 3.6 (a smaller model); Saxena 2023 (prompt lookup).
Cost: a pass of the small model for each draft token; a look into a dictionary for an n-gram.

    ModelDrafter    any model with the same vocabulary: a student, a copy with fewer layers or bits
    NgramDrafter    what followed the last tokens when they stood in the text before
    MedusaDrafter   extra heads on the target's last state (`minillm.speculation.medusa`)

A drafter is made once and keeps nothing. `start` opens a session for one sequence, and the session
may remember what it has computed: `propose` always gets the whole sequence, and the session finds
out by itself what of its memory still holds.
Not here: drafts for many sequences at once (`minillm.serving.batch_drafters`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minillm.kv_cache import KVCache
from minillm.model import Decoder
from minillm.sampling import Sampling, draw, greedy, probabilities
from minillm.tools.checks import check_token, check_whole


@dataclass(frozen=True)
class Draft:
    """Draft tokens: what may follow; at most as many as were asked for.

    probs (n, V): the distributions that they were drawn from; None if nothing was drawn.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Session(Protocol):
    """One sequence."""

    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], hidden: Tensor | None = None
    ) -> Draft:
        """Up to k tokens that may follow `ids`.

        uniforms: a number in [0, 1) to draw each with. hidden (C,): the target's hidden state that
        produced the last of `ids`, where it is known.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """What `speculative_generate` and the engine take; a drafter inherits from it."""

    uses_states: bool = False
    """Whether it reads the target's hidden states."""

    def start(self, target: Decoder, max_len: int, sampling: Sampling | None) -> Session:
        """A session for a sequence of at most max_len tokens, which are drawn as `sampling` says.

        ValueError for a target that it cannot draft for.
        """
        ...


def check_drafter(drafter: object) -> None:
    """TypeError for what is no Drafter, such as a bare model."""
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"drafter is a {type(drafter).__name__}; give a drafter: NgramDrafter(), "
            "ModelDrafter(model) or MedusaDrafter(heads)."
        )


class ModelDrafter(Drafter):
    """A smaller, shallower or coarser model with the target's vocabulary."""

    def __init__(self, model: Decoder):
        self.model = model

    def start(self, target: Decoder, max_len: int, sampling: Sampling | None) -> "_ModelSession":
        mine, theirs = self.model.config.vocab_size, target.config.vocab_size
        if mine != theirs:
            raise ValueError(
                f"The drafting model has {mine} token ids and the target {theirs}; both must have "
                "the same vocabulary."
            )
        return _ModelSession(self.model, max_len, sampling)


class _ModelSession:
    def __init__(self, model: Decoder, max_len: int, sampling: Sampling | None):
        self._model = model
        self._greedy = sampling is None or sampling.greedy
        self._sampling = sampling
        self._cache = KVCache(model, 1, min(max_len, model.config.max_seq_len))
        self._seen: list[int] = []  # the tokens that the cache holds

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], hidden: Tensor | None = None
    ) -> Draft:
        # Rejected draft tokens are forgotten, and the newest token is always computed.
        same = common_prefix_length(self._seen, ids[:-1])
        # By the cache's own length: an interrupt may have come between it and `_seen`.
        self._cache.rewind(self._cache.length - same)
        del self._seen[same:]
        tokens: list[int] = []
        probs: list[Tensor] = []
        fed = list(ids[same:])
        for i in range(min(k, self._cache.max_len - len(ids) + 1)):
            logits = self._logits(fed)  # (1, V)
            if self._greedy:
                fed = greedy(logits).tolist()
            else:
                probs.append(probabilities(logits, self._sampling))
                fed = draw(probs[-1], uniforms[i : i + 1])
            tokens.append(check_token(fed[0], "drafting model"))
        return Draft(tokens, torch.cat(probs) if probs else None)

    def _logits(self, fed: list[int]) -> Tensor:
        """Logits (1, V) of the token after `fed`, which follow what the cache holds."""
        tokens = torch.tensor([fed], device=self._model.device)  # (1, T)
        hidden = self._model.hidden(tokens, self._cache)
        self._seen += fed
        return self._model.head(hidden[0, -1:])


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


class NgramDrafter(Drafter):
    """Prompt lookup: the tokens that followed the last few, where these stood before.

    The longest of the last `longest` … `shortest` tokens that occurred decides, at its latest
    place. Good where an answer repeats its prompt: code that is edited, a text that is quoted.
    """

    def __init__(self, longest: int = 4, shortest: int = 2):
        check_whole("shortest", shortest)
        check_whole("longest", longest, least=shortest)
        self.lengths = range(longest, shortest - 1, -1)

    def start(self, target: Decoder, max_len: int, sampling: Sampling | None) -> "_NgramSession":
        return _NgramSession(self.lengths)


class _NgramSession:
    """ids only grow, so each place is looked at once."""

    def __init__(self, lengths: Sequence[int]):
        self._places: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        self._n_seen = 0  # tokens whose n-grams are known, with the token that follows

    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], hidden: Tensor | None = None
    ) -> Draft:
        # Note where each n-gram ends that has a token after it.
        for n, places in self._places.items():
            for end in range(max(n, self._n_seen), len(ids)):
                places[tuple(ids[end - n : end])] = end
        self._n_seen = len(ids)
        # What followed the longest n-gram that the text ends with?
        for n, places in self._places.items():
            end = places.get(tuple(ids[len(ids) - n :])) if len(ids) >= n else None
            if end is not None:
                return Draft(list(ids[end : end + k]))
        return Draft()
