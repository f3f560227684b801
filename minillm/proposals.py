"""Speculation in a batch: guesses for the requests of the engine, as many as they are worth.

Sources: Leviathan et al. 2023; Liu et al. 2024 (SmartSpec): k by what is accepted, and none when
the batch is too large for guesses to pay.
Cost: the drafts of a step (a model drafts for all requests in one pass a guess); their verification
rides along in the step's pass, as long as `max_batch_tokens` and the free blocks have room.

Here a token is drawn from the target's distribution with the uniform number of its place, and a
guess is right if it is that token. So a request's tokens are the same with and without guesses,
greedy or sampled. The drafter draws with the same number: two distributions that are close then
mostly agree. (The rule of `minillm.speculative` accepts some more sampled guesses, and gives other
tokens of the same distribution.)

k adapts to each request: one more after a step in which no guess was wrong, half after one in which
the first was, and none at all for a while when even a single guess fails. A step that computes
prompts has no guesses, since it uses the arithmetic units already. In the others the clock decides
(`Pace`), for small and large batches apart: one request leaves those units idle, so verification is
nearly free; many requests do not.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.checks import check_whole
from minillm.drafters import Batch, Drafter, Session, check_drafter, common_start
from minillm.model import Decoder
from minillm.request import Request
from minillm.timeline import Step

PAUSE = 16
"""Tokens until a request without guesses gets one again."""
WITH, WITHOUT, FASTER = 9, 5, 128
"""Steps of a trial with guesses, of one without, and of the faster way until the next trial."""


class Pace:
    """Seconds a token with guesses and without, and which way the next step goes.

    Both are tried, then the faster one is taken, then both are tried again. Without guesses a step
    yields one token for each request, so a few steps are enough.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._n_steps = 0
        self._seconds, self._tokens = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}

    @property
    def guess(self) -> bool:
        """Whether the next step should have guesses."""
        if self._n_steps < WITH + WITHOUT:
            return self._n_steps < WITH
        with_guesses, without = (self._seconds[way] / self._tokens[way] for way in (True, False))
        return with_guesses <= without

    def record(self, guessed: bool, seconds: float, tokens: float) -> None:
        """A step is over that gave each request so many tokens on average."""
        # In the first step of a trial a drafter may have to catch up with what it has not seen.
        if self._n_steps not in (0, WITH):
            self._seconds[guessed] += seconds
            self._tokens[guessed] += tokens
        self._n_steps += 1
        if self._n_steps == WITH + WITHOUT + FASTER:
            self._begin()


@dataclass
class _State:
    k: int  # guesses next time
    guesses: Sequence[int] = ()  # last time
    n_ids: int = 0  # tokens there were then
    again: int = 0  # no guesses before there are so many


class Proposals:
    """The engine's proposer for a drafter: guesses for all requests that decode.

    What is remembered of a request goes with the first step after its end. timeline: the engine's;
    its last line says how long the last step took. pace: what decides whether guesses pay.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Decoder,
        k: int,
        *,
        n_blocks: int,
        block_size: int,
        timeline: Sequence[Step],
        pace: Callable[[], Pace] = Pace,
    ):
        check_whole("k", k)
        check_drafter(drafter)
        drafter.start(target, 1, None)  # refuses a target that it does not fit, before any request
        start = getattr(drafter, "batch", None)
        self._batch: Batch = (
            start(target, n_blocks, block_size) if start else _OneByOne(drafter, target)
        )
        self._k, self._timeline = k, timeline
        self._states: dict[Request, _State] = {}
        # By the binary digits of the number of requests.
        self._paces: defaultdict[int, Pace] = defaultdict(pace)
        self._last: tuple[list[tuple[Request, int]], bool] = ([], False)

    def __call__(self, requests: Sequence[Request]) -> list[Sequence[int]]:
        """Guesses for each of the requests, which are all that run."""
        self._record()
        guess = self._paces[len(requests).bit_length()].guess
        guess = guess and all(request.decoding for request in requests)
        # Those of requests that were sent back to the queue stay.
        self._states = {r: state for r, state in self._states.items() if not r.finish_reason}
        ks = []
        for request in requests:
            state = self._states.setdefault(request, _State(self._k))
            self._learn(state, request)
            room = request.max_new_tokens - request.n_produced - 1
            ks.append(min(state.k, room) if guess else 0)
        self._last = [(request, len(request.ids)) for request in requests], guess
        drafts = self._batch.propose(requests, ks)
        for request, draft in zip(requests, drafts, strict=True):
            state = self._states[request]
            state.guesses, state.n_ids = draft, len(request.ids)
        return drafts

    def _record(self) -> None:
        """How long the last step took for how many tokens; one with prompts says nothing."""
        requests, guessed = self._last
        n_tokens = sum(len(request.ids) - n for request, n in requests)
        if n_tokens and self._timeline and not self._timeline[-1].prefilled:
            step, pace = self._timeline[-1], self._paces[len(requests).bit_length()]
            pace.record(guessed, step.end - step.start, n_tokens / len(requests))
        self._last = [], False

    def _learn(self, state: _State, request: Request) -> None:
        """Adapt k to how many of the last guesses came true."""
        n = len(request.ids)
        if state.guesses and n > state.n_ids:
            came = request.ids[state.n_ids :]
            n_right = common_start(state.guesses, came)
            if n_right == min(len(state.guesses), len(came)):
                state.k = min(self._k, state.k + 1)
            elif n_right == 0:
                state.k //= 2
                state.again = n + PAUSE
            state.guesses = ()
        if state.k == 0 and n >= state.again:
            state.k = 1


class _OneByOne:
    """For a drafter without `batch`: a session for each request."""

    def __init__(self, drafter: Drafter, target: Decoder):
        self._drafter, self._target = drafter, target
        self._sessions: dict[Request, Session] = {}

    def propose(self, requests: Sequence[Request], ks: Sequence[int]) -> list[list[int]]:
        self._sessions = {r: self._sessions.get(r) or self._started(r) for r in requests}
        drafts: list[list[int]] = []
        for (request, session), k in zip(self._sessions.items(), ks, strict=True):
            uniforms = [request.uniform(i) for i in range(k)]
            draft = session.propose(request.ids, k, uniforms, request.state) if k > 0 else None
            drafts.append(draft.tokens if draft else [])
        return drafts

    def _started(self, request: Request) -> Session:
        longest = request.n_prompt + request.max_new_tokens
        return self._drafter.start(self._target, longest, request.sampling)
