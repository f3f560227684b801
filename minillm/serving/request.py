"""A request on its way from prompt to answer, and what the caller gets in the end. No tensors."""

import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from minillm.blocks import BlockTable
from minillm.tools.checks import brief, check_token

OnToken = Callable[[int], bool | None]
"""Called with each token of an answer; True ends it there."""


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer.

    `ids` holds the prompt and what has been produced; `table.n_tokens` of them are computed. A
    token counts once it is in `ids`. Everything else can be rebuilt from the request after an
    interrupt (`minillm.serving.recovery`).
    """

    id: int
    ids: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Any = None
    parent: "Request | None" = None  # compute its prompt first, then share it: parallel samples
    on_token: OnToken | None = None
    stream: random.Random | None = None  # of numbers in [0, 1), one a token; None if greedy
    uniforms: array = field(default_factory=lambda: array("d"))  # its first numbers
    top_logprobs: int | None = None  # log-probabilities, with those of so many likeliest tokens
    logprobs: list[Any] = field(default_factory=list)  # one for each token, if asked for
    arrival: float = 0.0
    times: list[float] = field(default_factory=list)  # when each token was produced
    n_delivered: int = 0  # tokens that `on_token` has had
    all_delivered: bool = False  # nothing is left for `on_token`, and nothing will come
    ended_at: float = math.nan  # on the engine's clock, as `arrival`
    finish_reason: str | None = None
    error: str | None = None
    table: BlockTable = field(default_factory=BlockTable)
    draft_tokens: list[int] = field(default_factory=list)  # may follow `ids`; not yet verified
    hidden: Any = None  # (C,), the hidden state that produced the newest token
    admitted: bool = False  # has been running at least once
    admitted_at: float = math.nan  # when its first step began, on the engine's clock
    stopped: bool = False  # `on_token` has said that this is enough
    n_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.ids)

    @property
    def tokens(self) -> list[int]:
        """What has been produced so far."""
        return self.ids[self.n_prompt :]

    @property
    def n_produced(self) -> int:
        """How many tokens those are."""
        return len(self.ids) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens still to be computed before the next one can be produced."""
        return len(self.ids) - self.table.n_tokens

    @property
    def decoding(self) -> bool:
        """Whether only the newest token, one that was produced, is left to compute."""
        return self.n_pending == 1 and self.n_produced > 0

    @property
    def reached(self) -> str | None:
        """The end that the newest token has reached, "stop" or "length"; None if more follow."""
        if self.stopped or (self.n_produced and self.ids[-1] in self.stop_ids):
            return "stop"
        return "length" if self.n_produced >= self.max_new_tokens else None

    def uniform(self, i: int) -> float:
        """The number that draws the token `i` places after the newest; 0.0 for greedy requests."""
        if self.stream is None:
            return 0.0
        place = self.n_produced + i
        while len(self.uniforms) <= place:
            self.uniforms.append(self.stream.random())
        return self.uniforms[place]

    def accept(self, drawn: list[int], now: float, logprobs: Sequence[Any] = ()) -> int:
        """Add the tokens drawn after the newest one and after each draft token.

        A token counts as long as the draft tokens before it were right, and the answer is not over.
        logprobs: those of the tokens, if the request asks for them. Returns how many draft tokens
        were wrong. ValueError for logits that are not numbers.
        """
        draft, self.draft_tokens = self.draft_tokens[: len(drawn) - 1], []
        for n_right, token in enumerate(drawn):
            check_token(token)
            del self.times[self.n_produced :]  # of a token that an interrupt took back
            self.times.append(now)
            del self.logprobs[self.n_produced :]
            self.logprobs += logprobs[n_right : n_right + 1]
            self.ids.append(token)
            if self.reached or n_right == len(draft) or draft[n_right] != token:
                return len(draft) - n_right
        return 0

    def deliver(self) -> None:
        """Call `on_token` with the tokens that it has not had yet.

        Where it returns True the answer ends: tokens after that one, right guesses, are dropped.
        """
        while self.on_token is not None and self.n_delivered < self.n_produced:
            self.n_delivered += 1
            end = self.n_prompt + self.n_delivered
            if self.on_token(self.ids[end - 1]) is True:
                self.stopped = True
                del self.ids[end:]

    def completion(self) -> "Completion":
        """What the caller gets, once the request is over."""
        return Completion(
            request_id=self.id,
            n_prompt=self.n_prompt,
            tokens=self.tokens,
            finish_reason=self.finish_reason,
            arrival=self.arrival,
            token_times=[moment - self.arrival for moment in self.times[: self.n_produced]],
            duration=self.ended_at - self.arrival,
            queued=self.admitted_at - self.arrival,
            error=self.error,
            logprobs=self.logprobs[: self.n_produced],
        )


def _callbacks(on_token: OnToken | Sequence[OnToken | None] | None, n: int) -> list[OnToken | None]:
    """One callback for each of n samples: the given ones, or the one that they share."""
    given = list(on_token) if isinstance(on_token, (list, tuple)) else [on_token]
    if not all(each is None or callable(each) for each in given):
        raise TypeError(f"on_token is {brief(on_token)}; give a function of one token id.")
    if len(given) not in (1, n):
        raise ValueError(
            f"on_token has {len(given)} functions for {n} samplings; give one for each, or one for "
            "all."
        )
    return given if len(given) == n else given * n


def parallel_samples(
    first_id: int,
    ids: Sequence[int],
    max_new_tokens: int,
    samplings: Sequence[Any],
    *,
    stop_ids: frozenset[int],
    on_token: OnToken | Sequence[OnToken | None] | None,
    arrival: float,
    top_logprobs: int | None,
) -> list[Request]:
    """A request for each of `samplings`, all with one prompt, which the first one computes.

    on_token: one for each of them, or one for all.
    """
    heard = _callbacks(on_token, len(samplings))
    requests: list[Request] = []
    for i, sampling in enumerate(samplings, first_id):
        drawn = sampling is not None and not sampling.greedy
        request = Request(
            i,
            list(ids),
            max_new_tokens,
            stop_ids=stop_ids,
            sampling=sampling,
            parent=requests[0] if requests else None,
            on_token=heard[i - first_id],
            arrival=arrival,
            stream=sampling.stream() if drawn else None,
            top_logprobs=top_logprobs,
        )
        requests.append(request)
    return requests


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    finish_reason: "stop" (a stop id, which is the last token, or `on_token` returned True),
    "length", or "aborted" (by `abort`, or by an error). Times are in seconds from `arrival` on:
    `token_times` has one for each token, `queued` is when the request was first let in (NaN if it
    never was), `duration` when it was over. `logprobs` has a `TokenLogprobs` for each token, if
    they were asked for.
    """

    request_id: int
    n_prompt: int
    tokens: list[int]
    finish_reason: str
    arrival: float
    token_times: list[float]
    duration: float
    queued: float = math.nan
    error: str | None = None
    logprobs: list[Any] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to the first token; NaN without any."""
        return self.token_times[0] if self.tokens else math.nan

    @property
    def latency(self) -> float:
        """Time to the last token, or to the end if there was none."""
        return self.token_times[-1] if self.tokens else self.duration

    @property
    def tpot(self) -> float:
        """Time per output token: the mean time between two; NaN with fewer than two tokens."""
        n = len(self.tokens)
        return (self.latency - self.ttft) / (n - 1) if n > 1 else math.nan

    @property
    def inter_token(self) -> list[float]:
        """Inter-token latencies: the time from each token to the next."""
        return [b - a for a, b in pairwise(self.token_times)]
