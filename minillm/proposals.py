"""Speculation in a batch: guesses for each request of the engine, as many as they are worth.

Sources: Leviathan et al. 2023; Liu et al. 2024 (SmartSpec), for adapting k to what is accepted.
Cost: the drafts of a step, one request after the other; their verification rides along in the
step's pass, as long as `max_batch_tokens` has room.

Here a token is drawn from the target's distribution with the uniform number of its place, and a
guess is right if it is that token. So a request's tokens are the same with and without guesses,
greedy or sampled. The drafter draws with the same number: two distributions that are close then
mostly agree. (The rule of `minillm.speculative` accepts some more sampled guesses, and gives other
tokens of the same distribution.)

k adapts to each request: one more after a step in which all guesses were right, half after one in
which none was, and none at all for a while when even a single guess fails.
Not here: drafts of several requests in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from minillm.checks import check_whole
from minillm.drafters import Drafter, Session, check_drafter, common_start
from minillm.model import Decoder
from minillm.request import Request

PAUSE = 16
"""Tokens until a request without guesses gets one again."""


@dataclass
class _State:
    session: Session
    k: int  # guesses next time
    guesses: Sequence[int] = ()  # last time
    n_ids: int = 0  # tokens there were then
    again: int = 0  # no guesses before there are so many


class Proposals:
    """The engine's proposer for a drafter: guesses for one request at a time.

    What a request's session remembers goes when the request does.
    """

    def __init__(self, drafter: Drafter, target: Decoder, k: int):
        check_whole("k", k)
        check_drafter(drafter)
        drafter.start(target, 1, None)  # refuses a target that it does not fit, before any request
        self.drafter, self.target, self.k = drafter, target, k
        self._states: WeakKeyDictionary[Request, _State] = WeakKeyDictionary()

    def __call__(self, request: Request) -> Sequence[int]:
        state = self._states.get(request)
        if state is None:
            for other in [r for r in self._states if r.finish_reason]:
                del self._states[other]  # the engine keeps a request until it is handed out
            longest = request.n_prompt + request.max_new_tokens
            session = self.drafter.start(self.target, longest, request.sampling)
            state = self._states[request] = _State(session, self.k)
        self._learn(state, request)
        room = request.max_new_tokens - request.n_produced - 1
        n = min(state.k, room)
        if n < 1:
            return ()
        uniforms = [request.uniform(i) for i in range(n)]
        draft = state.session.propose(request.ids, n, uniforms, request.state)
        state.guesses = draft.tokens
        state.n_ids = len(request.ids)
        return state.guesses

    def _learn(self, state: _State, request: Request) -> None:
        """Adapt k to how many of the last guesses came true."""
        n = len(request.ids)
        if state.guesses and n > state.n_ids:
            came = request.ids[state.n_ids :]
            n_right = common_start(state.guesses, came)
            if n_right == min(len(state.guesses), len(came)):
                state.k = min(self.k, state.k + 1)
            elif n_right == 0:
                state.k //= 2
                state.again = n + PAUSE
            state.guesses = ()
        if state.k == 0 and n >= state.again:
            state.k = 1
