"""Drafters for a batch: draft tokens for all requests of the engine in one go.

Source: Leviathan et al. 2023, section 3.6, for many sequences at once.
Cost: a model drafts for all requests in one pass for each draft token; Medusa heads in one product
with the target's head; any other drafter has a session for each request.

    batch_drafter   finds the batch form of a drafter by its class
    ModelBatch      a model, over paged blocks of its own
    MedusaBatch     heads on the target's hidden states
    OneByOne        a session for each request
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from itertools import accumulate, chain
from typing import Protocol

import torch

from minillm.blocks import BlockTable, OutOfBlocks
from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.sampling import next_tokens
from minillm.serving.request import Request
from minillm.speculation.drafters import (
    Drafter,
    ModelDrafter,
    Session,
    common_prefix_length,
)
from minillm.speculation.medusa import MedusaDrafter, MedusaSession
from minillm.tools.checks import check_token

CATCH_UP = 512
"""Tokens of prompts that a drafting model computes in one pass, before it drafts."""


class BatchDrafter(Protocol):
    """All requests of an engine."""

    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        """Up to ks[i] tokens that may follow those of requests[i], drawn as the request's own.

        requests: all that run, in every step, also those with k 0: what is remembered of others is
        forgotten.
        """
        ...


@singledispatch
def batch_drafter(
    drafter: Drafter, target: Decoder, n_blocks: int, block_size: int
) -> BatchDrafter:
    """The batch form of a drafter, for an engine with so many blocks."""
    return OneByOne(drafter, target)


@batch_drafter.register
def _(drafter: ModelDrafter, target: Decoder, n_blocks: int, block_size: int) -> BatchDrafter:
    return ModelBatch(drafter.model, n_blocks, block_size)


@batch_drafter.register
def _(drafter: MedusaDrafter, target: Decoder, n_blocks: int, block_size: int) -> BatchDrafter:
    return MedusaBatch(drafter.start(target, 1, None))


@dataclass
class _Drafted:
    """A request's place in the drafting model's cache: all of its tokens, then draft tokens."""

    table: BlockTable
    n_ids: int = 0  # the request's tokens at the last draft
    draft: list[int] = field(default_factory=list)


class ModelBatch:
    """A pass for each draft token, with all requests in it, over paged blocks of the model's own.

    What a request has before its first draft token is computed in the first of these passes,
    CATCH_UP tokens of all requests at most; a request with more to compute gets no draft yet.
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
        fed = self._first_tokens(wanted)
        n_done = 0  # draft tokens of each request so far
        while fed:
            drawn = self._pass(fed, n_done)
            n_done += 1
            for request, token in drawn.items():
                if wanted[request]:
                    self._known[request].draft.append(token)
            fed = {r: self._known[r].draft[-1:] for r in fed if wanted[r] > n_done}
        for request in wanted:
            self._cache.manager.remember(self._known[request].table, request.ids)
        return [self._known[r].draft if r in wanted else [] for r in requests]

    def _first_tokens(self, wanted: dict[Request, int]) -> dict[Request, list[int]]:
        """What each request computes in the first pass; who cannot catch up then wants nothing."""
        fed: dict[Request, list[int]] = {}
        left = CATCH_UP
        for request in wanted:
            n_held = self._known[request].table.n_tokens
            if len(request.ids) - n_held > left:
                wanted[request] = 0
            if left:
                fed[request] = request.ids[n_held : n_held + left]
                left -= len(fed[request])
        return fed

    def _pass(self, fed: dict[Request, list[int]], i: int) -> dict[Request, int]:
        """Draft token i of each request, from one pass over what is fed."""
        tables = [self._known[request].table for request in fed]
        n_new = [len(tokens) for tokens in fed.values()]
        row = torch.tensor([[*chain(*fed.values())]], device=self._model.device)  # (1, N)
        hidden = self._model.hidden(row, self._cache.batch(tables, n_new))[0]  # (N, C)
        ends = torch.tensor(list(accumulate(n_new)), device=hidden.device) - 1
        logits = self._model.head(hidden[ends])  # (n_requests, V)
        samplings, uniforms = [r.sampling for r in fed], [r.uniform(i) for r in fed]
        drawn = zip(fed, next_tokens(logits, samplings, uniforms), strict=True)
        return {request: check_token(token, "drafting model") for request, token in drawn}

    def _made_ready(self, request: Request, k: int) -> int:
        """Forget wrong draft tokens and make room for k new ones; for how many there is room."""
        n = len(request.ids)
        k = min(k, self._model.config.max_seq_len - n + 1)
        if k < 1:
            return 0
        manager = self._cache.manager
        if request not in self._known:
            self._known[request] = _Drafted(manager.start(request.ids), n)
        known = self._known[request]
        same = known.n_ids + common_prefix_length(known.draft, request.ids[known.n_ids :])
        manager.rewind(known.table, max(0, known.table.n_tokens - min(same, n - 1)))
        try:
            self._cache.reserve(known.table, n + k - 1 - known.table.n_tokens)
        except OutOfBlocks:  # shared prompts may let more requests into the target's blocks
            # From the start next time: by then its prompt may be known.
            manager.release(self._known.pop(request).table)
            return 0
        known.n_ids, known.draft = n, []
        return k


class MedusaBatch:
    """Medusa heads: the chains of all requests in one product with the target's head."""

    def __init__(self, session: MedusaSession):
        self._session = session

    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        asked = [i for i, r in enumerate(requests) if ks[i] and r.hidden is not None]
        drafts: list[list[int]] = [[] for _ in requests]
        if asked:
            hidden = torch.stack([requests[i].hidden for i in asked])  # (n, C)
            chains = self._session.chains(hidden, max(ks[i] for i in asked))
            for i, tokens in zip(asked, chains, strict=True):
                drafts[i] = tokens[: ks[i]]
        return drafts


class OneByOne:
    """For any other drafter: a session for each request."""

    def __init__(self, drafter: Drafter, target: Decoder):
        self._drafter, self._target = drafter, target
        self._sessions: dict[Request, Session] = {}

    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        self._sessions = {r: self._sessions.get(r) or self._started(r) for r in requests}
        drafts: list[list[int]] = []
        for (request, session), k in zip(self._sessions.items(), ks, strict=True):
            uniforms = [request.uniform(i) for i in range(k)]
            draft = session.propose(request.ids, k, uniforms, request.hidden) if k > 0 else None
            drafts.append(draft.tokens if draft else [])
        return drafts

    def _started(self, request: Request) -> Session:
        longest = request.n_prompt + request.max_new_tokens
        return self._drafter.start(self._target, longest, request.sampling)
