"""Speculation in a batch: draft tokens for the engine's requests, as many as they are worth.

Sources: Leviathan et al. 2023; Liu et al. 2024 (SmartSpec): k by what is accepted, and none when
the batch is too large for drafts to pay.
Cost: the drafts of a step (a model drafts for all requests in one pass a token); their verification
rides along in the step's pass, as long as `max_batch_tokens` and the free blocks have room.

Here a token is drawn from the target's distribution with the uniform number of its place, and a
draft token is right if it is that token. So a request's tokens are the same with and without
drafts, greedy or sampled. The drafter draws with the same number: two distributions that are close
then mostly agree. (The rule of `minillm.speculation.speculative` accepts some more sampled ones,
and gives other tokens of the same distribution.)

k adapts to each request: one more after a step in which no draft token was wrong, half after one in
which the first was, and none at all for a while when even a single one fails. A step that computes
prompts has no drafts, since it uses the arithmetic units already. In the others the clock decides
(`Pace`), for small and large batches apart: one request leaves those units idle, so verification is
nearly free; many requests do not.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from minillm.model import Decoder
from minillm.serving.batch_drafters import batch_drafter
from minillm.serving.request import Request
from minillm.serving.timeline import Step
from minillm.speculation.drafters import Drafter, check_drafter, common_prefix_length
from minillm.tools.checks import check_whole

_log = logging.getLogger(__name__)

PAUSE = 16
"""Tokens until a request without drafts gets one again."""
WITH, WITHOUT, FASTER = 9, 5, 128
"""Steps of a trial with drafts, of one without, and of the faster way until the next trial."""


class Proposer(Protocol):
    """What the engine asks for draft tokens."""

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Tokens that may follow those of each of the requests, which are all that run.

        Only those of requests that are `decoding` are verified.
        """
        ...

    def observe(self, step: Step) -> None:
        """The step is over, and its tokens stand in the requests."""
        ...


class Pace:
    """Seconds a token with drafts and without, and which way the next step goes.

    Both are tried, then the faster one is taken, then both are tried again. Without drafts a step
    yields one token for each request, so a few steps are enough.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._n_steps = 0
        self._seconds, self._tokens = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}

    @property
    def draft(self) -> bool:
        """Whether the next step should have draft tokens."""
        if self._n_steps < WITH + WITHOUT:
            return self._n_steps < WITH
        with_drafts, without = (self._seconds[way] / self._tokens[way] for way in (True, False))
        return with_drafts <= without

    def record(self, drafted: bool, seconds: float, tokens: float) -> None:
        """A step is over that gave each request so many tokens on average."""
        # In the first step of a trial a drafter may have to catch up with what it has not seen.
        if self._n_steps not in (0, WITH):
            self._seconds[drafted] += seconds
            self._tokens[drafted] += tokens
        self._n_steps += 1
        if self._n_steps == WITH + WITHOUT + FASTER:
            self._begin()


@dataclass
class _State:
    k: int  # draft tokens next time
    draft: Sequence[int] = ()  # last time
    n_ids: int = 0  # tokens there were then
    again: int = 0  # no drafts before there are so many tokens


def give_drafts(proposer: Proposer, running: Sequence[Request]) -> None:
    """Give each decoding request its draft tokens for the next step, none if the proposer fails."""
    running = list(running)
    try:
        drafts = dict(zip(running, proposer.propose(running), strict=True))
    except Exception:  # draft tokens are no part of the answer
        _log.exception("The drafter failed; this step has no draft tokens.")
        drafts = {}
    for request in running:
        # A step gives one token by itself, and no more than max_new_tokens are wanted.
        room = request.max_new_tokens - request.n_produced - 1 if request.decoding else 0
        request.draft_tokens = list(drafts.get(request, ()))[:room]


class Proposals(Proposer):
    """The engine's proposer for a drafter: draft tokens for all requests that decode.

    What is remembered of a request goes with the first step after its end. pace: what decides
    whether drafts pay.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Decoder,
        k: int,
        *,
        n_blocks: int,
        block_size: int,
        pace: Callable[[], Pace] = Pace,
    ):
        check_whole("k", k)
        check_drafter(drafter)
        drafter.start(target, 1, None)  # refuses a target that it does not fit, before any request
        self._batch = batch_drafter(drafter, target, n_blocks, block_size)
        self._k = k
        self._states: dict[Request, _State] = {}
        # By the binary digits of the number of requests.
        self._paces: defaultdict[int, Pace] = defaultdict(pace)
        self._last: tuple[list[tuple[Request, int]], bool] = ([], False)

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        wanted = self._paces[len(requests).bit_length()].draft
        wanted = wanted and all(request.decoding for request in requests)
        self._last = [(request, len(request.ids)) for request in requests], wanted
        # Those of requests that were sent back to the queue stay.
        self._states = {r: state for r, state in self._states.items() if not r.finish_reason}
        ks = []
        for request in requests:
            state = self._states.setdefault(request, _State(self._k))
            self._learn(state, request)
            room = request.max_new_tokens - request.n_produced - 1
            ks.append(min(state.k, room) if wanted else 0)
        drafts = self._batch.propose(requests, ks)
        for request, draft in zip(requests, drafts, strict=True):
            state = self._states[request]
            state.draft, state.n_ids = draft, len(request.ids)
        return drafts

    def observe(self, step: Step) -> None:
        """How long the step took for how many tokens; one with prompts says nothing."""
        requests, drafted = self._last
        n_tokens = sum(len(request.ids) - n for request, n in requests)
        if n_tokens and not step.prefilled:
            pace = self._paces[len(requests).bit_length()]
            pace.record(drafted, step.end - step.start, n_tokens / len(requests))
        self._last = [], False

    def _learn(self, state: _State, request: Request) -> None:
        """Adapt k to how many of the last draft tokens came true."""
        n = len(request.ids)
        if state.draft and n > state.n_ids:
            came = request.ids[state.n_ids :]
            n_right = common_prefix_length(state.draft, came)
            if n_right == min(len(state.draft), len(came)):
                state.k = min(self._k, state.k + 1)
            elif n_right == 0:
                state.k //= 2
                state.again = n + PAUSE
            state.draft = ()
        if state.k == 0 and n >= state.again:
            state.k = 1
