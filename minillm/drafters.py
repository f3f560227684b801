"""Drafters: who guesses which tokens come next, cheaply enough to be wrong.

Sources: Leviathan et al. 2023, section 3.6 (a smaller model); Saxena 2023 (prompt lookup).
Cost: a pass of the small model for each guess; a look into a dictionary for an n-gram.

    ModelDrafter    any model with the same vocabulary: a student, a copy with fewer layers or bits
    NgramDrafter    what followed the last tokens when they stood in the text before
    MedusaDrafter   extra heads on the target's last state (`minillm.medusa`)

A drafter is made once and keeps nothing. `start` opens a session for one sequence, and the session
may remember what it has computed: `propose` always gets the whole sequence, and the session finds
out by itself what of its memory still holds. `batch` opens one for all requests of an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from minillm.blocks import BlockTable, OutOfBlocks
from minillm.checks import check_whole
from minillm.kv_cache import KVCache
from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.request import Request
from minillm.sampling import Sampling, draw, likeliest, pick, probabilities

CATCH_UP = 512
"""Tokens of prompts that a drafting model computes in one pass, before it guesses."""


@dataclass(frozen=True)
class Draft:
    """Guesses for the tokens that follow; at most as many as were asked for.

    probs (n, V): the distributions that they were drawn from; None if nothing was drawn.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Session(Protocol):
    """One sequence."""

    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], state: Tensor | None = None
    ) -> Draft:
        """Up to k tokens that may follow `ids`.

        uniforms: a number in [0, 1) to draw each with. state (C,): the target's, out of which the
        last of `ids` came, where it is known.
        """
        ...


class Batch(Protocol):
    """All requests of an engine."""

    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        """Up to ks[i] tokens that may follow those of requests[i], drawn as the request's own.

        requests: all that run, in every step, also those with k 0: what is remembered of others is
        forgotten.
        """
        ...


class Drafter(Protocol):
    """What `speculative_generate` and the engine take.

    For the engine it may also have a method `batch` as `ModelDrafter` does, to draft for all
    requests at once; otherwise each has a session of its own.
    """

    def start(self, target: Decoder, max_len: int, sampling: Sampling | None) -> Session:
        """A session for a sequence of at most max_len tokens, whose tokens are drawn like that.

        ValueError for a target that it cannot draft for.
        """
        ...


def check_drafter(drafter: object) -> None:
    """TypeError for what has no `start`, as a bare model."""
    if not callable(getattr(drafter, "start", None)):
        raise TypeError(
            f"drafter is a {type(drafter).__name__}; give a drafter: NgramDrafter(), "
            "ModelDrafter(model) or MedusaDrafter(heads)."
        )


class ModelDrafter:
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

    def batch(self, target: Decoder, n_blocks: int, block_size: int) -> "_ModelBatch":
        """Drafts for all requests of an engine with so many blocks."""
        return _ModelBatch(self.model, n_blocks, block_size)


class _ModelSession:
    def __init__(self, model: Decoder, max_len: int, sampling: Sampling | None):
        self._model = model
        self._greedy = sampling is None or sampling.greedy
        self._sampling = sampling
        self._cache = KVCache(model, 1, min(max_len, model.config.max_seq_len))
        self._seen: list[int] = []  # the tokens that the cache holds

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], state: Tensor | None = None
    ) -> Draft:
        # What was guessed wrong is forgotten, and the newest token always computed.
        same = common_start(self._seen, ids[:-1])
        # By the cache's own length: an interrupt may have come between it and `_seen`.
        self._cache.rewind(self._cache.length - same)
        del self._seen[same:]
        tokens, rows = [], []
        fed = list(ids[same:])
        for i in range(min(k, self._cache.max_len - len(ids) + 1)):
            hidden = self._model.hidden(torch.tensor([fed], device=self._model.device), self._cache)
            self._seen += fed
            logits = self._model.head(hidden[0, -1:])  # (1, V)
            if self._greedy:
                fed = [int(likeliest(logits[0]))]
            else:
                rows.append(probabilities(logits, self._sampling))
                fed = pick(rows[-1], uniforms[i : i + 1])
                if fed[0] < 0:
                    raise ValueError("The drafting model's logits are not numbers (NaN).")
            tokens += fed
        return Draft(tokens, torch.cat(rows) if rows else None)


@dataclass
class _Drafted:
    """A request's place in the drafting model's cache: all of its tokens, then some guesses."""

    table: BlockTable
    n_ids: int = 0  # the request's tokens at the last draft
    guesses: list[int] = field(default_factory=list)


class _ModelBatch:
    """A pass for each guess, with all requests in it, over paged blocks of the model's own.

    What a request has before its first guess is computed in the first of these passes, CATCH_UP
    tokens of all requests at most; a request with more to compute gets no guesses yet.
    """

    def __init__(self, model: Decoder, n_blocks: int, block_size: int):
        self._model = model
        self._cache = PagedKVCache(model, n_blocks, block_size)
        self._known: dict[Request, _Drafted] = {}

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        try:
            for request in self._known.keys() - set(requests):  # ended, or sent back to the queue
                self._cache.manager.release(self._known.pop(request).table)
            return self._draft(requests, ks)
        except BaseException:  # an interrupt may have come anywhere: begin again
            self._cache.manager.reset()
            self._known.clear()
            raise

    def _draft(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        ready = [self._made_ready(r, k) for r, k in zip(requests, ks, strict=True)]
        wanted = {r: k for r, k in zip(requests, ready, strict=True) if k}
        fed, left = {}, CATCH_UP
        for request in wanted:
            n_held, n = self._known[request].table.n_tokens, len(request.ids)
            if n - n_held > left:
                wanted[request] = 0  # no guesses yet
            if left:
                fed[request] = request.ids[n_held : n_held + left]
                left -= len(fed[request])
        n_done = 0
        while fed:
            tables = [self._known[r].table for r in fed]
            n_new = [len(tokens) for tokens in fed.values()]
            row = torch.tensor([[*chain(*fed.values())]], device=self._model.device)  # (1, N)
            hidden = self._model.hidden(row, self._cache.batch(tables, n_new))[0]
            ends = torch.tensor(list(accumulate(n_new)), device=hidden.device) - 1
            logits = self._model.head(hidden[ends])  # (n, V)
            best, samplings = likeliest(logits).tolist(), [r.sampling for r in fed]
            uniforms = [r.uniform(n_done) for r in fed]
            drawn = draw(logits, best, range(len(fed)), samplings, uniforms)
            n_done += 1
            for request, token in zip(fed, drawn, strict=True):
                if token < 0:
                    raise ValueError("The drafting model's logits are not numbers (NaN).")
                if wanted[request]:
                    self._known[request].guesses.append(token)
            fed = {r: self._known[r].guesses[-1:] for r in fed if wanted[r] > n_done}
        for request in wanted:
            self._cache.manager.remember(self._known[request].table, request.ids)
        return [self._known[r].guesses if r in wanted else [] for r in requests]

    def _made_ready(self, request: Request, k: int) -> int:
        """Forget wrong guesses and make room for k new ones; for how many there is room."""
        n = len(request.ids)
        k = min(k, self._model.config.max_seq_len - n + 1)
        if k < 1:
            return 0
        manager = self._cache.manager
        if request not in self._known:
            self._known[request] = _Drafted(manager.start(request.ids), n)
        known = self._known[request]
        same = known.n_ids + common_start(known.guesses, request.ids[known.n_ids :])
        manager.rewind(known.table, max(0, known.table.n_tokens - min(same, n - 1)))
        try:
            self._cache.reserve(known.table, n + k - 1 - known.table.n_tokens)
        except OutOfBlocks:  # shared prompts may let more requests into the target's blocks
            # From the start next time: by then its prompt may be known.
            manager.release(self._known.pop(request).table)
            return 0
        known.n_ids, known.guesses = n, []
        return k


def common_start(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


class NgramDrafter:
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
        self, ids: Sequence[int], k: int, uniforms: Sequence[float], state: Tensor | None = None
    ) -> Draft:
        for n, places in self._places.items():
            for end in range(max(n, self._n_seen), len(ids)):
                places[tuple(ids[end - n : end])] = end
        self._n_seen = len(ids)
        for n, places in self._places.items():
            end = places.get(tuple(ids[len(ids) - n :])) if len(ids) >= n else None
            if end is not None:
                return Draft(list(ids[end : end + k]))
        return Draft()
