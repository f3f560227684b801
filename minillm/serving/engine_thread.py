"""The engine's thread: it builds the model, steps the engine, and turns tokens into text.

Everything that computes runs in this one thread, the building of the model included. PyTorch keeps
a pool of workers for each thread that computes. With two pools on the same cores, one for the
thread that loaded and one for the thread that steps, a decode step took 1.4 to 2.3 times as long.

An engine is not made for two threads, so other threads hand over calls, which are made between two
steps. Text and stop strings are made here as well: an answer that has said its stop string takes
no part in the next step.
Not here: HTTP (`minillm.serving.http_server`).
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from minillm.sampling import Sampling, TokenLogprobs
from minillm.serving.answer_text import AnswerText
from minillm.serving.engine import Engine
from minillm.serving.prometheus import ServerMetrics
from minillm.serving.request import Completion
from minillm.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
T = TypeVar("T")
Build = Callable[[], AbstractContextManager[tuple[Engine, Tokenizer]]]
"""Makes the engine and its tokenizer; left when the thread ends."""

_FAILURES = 3  # steps that fail one after another until the engine is given up


class ClosedError(RuntimeError):
    """The engine's thread takes no more calls."""


@dataclass(frozen=True)
class Job:
    """What one client asks of the engine: one answer for each prompt and sampling.

    stop: texts that end an answer, and are no part of it. top_logprobs: as in `Engine.submit`.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    samplings: Sequence[Sampling | None]
    stop_ids: frozenset[int]
    stop: Sequence[str]
    arrival: float  # on the engine's clock
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Piece:
    """What one token adds to an answer; or its end, if there is a finish_reason.

    answer: its place: all samplings of the first prompt, then those of the second. text: what
    became complete with this token, often none or more than the token's own. finish_reason: "stop",
    "length" or "aborted"; error says why, unless `abort` was called.
    """

    answer: int
    text: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    error: str | None = None


Hear = Callable[[Piece], None]
"""Called in the engine's thread with each piece; it must return at once."""


class _Answer:
    """One answer on its way: called with its tokens, and with its end."""

    def __init__(self, place: int, job: Job, hear: Hear, thread: "EngineThread"):
        self.place, self._job, self._hear, self._thread = place, job, hear, thread
        self._text = AnswerText(thread.tokenizer, job.stop)
        self._newest = job.arrival  # when the newest token came, or the request
        self._begun = False
        self.request_id = -1  # until it is queued

    def on_token(self, token: int) -> bool:
        """Hand the token on; True where the answer has said a stop string."""
        now = self._thread.engine.clock.now()
        self._thread.metrics.token(now - self._newest, first=not self._begun)
        self._newest, self._begun = now, True
        text = "" if token in self._job.stop_ids else self._text.push(token)
        request = self._thread.engine.request(self.request_id)
        # A step may have made several tokens; this one is the newest that was delivered.
        logprobs = request.logprobs[request.n_delivered - 1] if request.logprobs else None
        self._hear(Piece(self.place, text, token, logprobs))
        return self._text.stopped

    def end(self, completion: Completion) -> None:
        """Hand on what is left of the text, and how the answer ended."""
        self._thread.metrics.completed(completion)
        reason, error = completion.finish_reason, completion.error
        self._hear(Piece(self.place, self._text.flush(), finish_reason=reason, error=error))

    def give_up(self, error: str) -> None:
        """The end of an answer that the engine cannot end any more."""
        self._hear(Piece(self.place, "", finish_reason="aborted", error=error))


class EngineThread:
    """Owns an engine: builds it, steps it while it is busy, and obeys calls between two steps.

        thread = EngineThread(build)
        thread.start()                          # returns when the model is there
        ids = thread.submit(job, hear).result()
        thread.abort(ids)
        thread.close()

    `engine`, `tokenizer` and `metrics` are there after `start`. Only look at them from other
    threads; `call` is the way to change anything.
    """

    engine: Engine
    tokenizer: Tokenizer
    metrics: ServerMetrics

    def __init__(self, build: Build):
        self._build = build
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, _Answer] = {}  # by request id
        self._lock = threading.Lock()  # of `_open` and of what it lets into `_calls`
        self._open = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ready: Future[None] = Future()
        self._n_failed = 0  # steps, one after another
        self._why_closed = "The server is shutting down; ask again later."

    def start(self) -> None:
        """Build the engine; returns when it is there, and raises what its making raised."""
        self._open = True
        self._thread.start()
        self._ready.result()

    @property
    def alive(self) -> bool:
        """Whether the thread takes calls."""
        return self._open

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function in this thread, before its next step.

        The future holds a ClosedError once the thread takes no more calls.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # the caller's
                future.set_exception(error)

        with self._lock:
            if self._open:
                self._calls.put(run)
            else:
                future.set_exception(ClosedError(self._why_closed))
        return future

    def submit(self, job: Job, hear: Hear) -> "Future[list[int]]":
        """Queue a job; gives the request ids of its answers. Nothing is queued if it raises."""
        return self.call(lambda: self._submit(job, hear))

    def score(self, prompt: Sequence[int], n_top: int) -> "Future[list[TokenLogprobs]]":
        """The engine's `score`, in a pass of its own between two steps."""
        return self.call(lambda: self.engine.score(prompt, n_top))

    def abort(self, ids: Sequence[int]) -> None:
        """End those requests before the next step, if they are not over. Nothing waits for it."""
        self.call(lambda: self._abort(ids))

    def close(self) -> None:
        """End all requests and the thread; returns when it is gone."""
        with self._lock:
            self._open = False
            self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        """The thread, from beginning to end."""
        try:
            with self._build() as (self.engine, self.tokenizer):
                self.metrics = ServerMetrics(self.engine)
                self._ready.set_result(None)
                try:
                    while self._obey():
                        self._step()
                except BaseException:
                    self._why_closed = "The engine failed; start the server again."
                    raise
                finally:
                    self._end()
        except BaseException as error:
            if self._ready.done():
                _log.exception("The engine is given up.")
            else:
                self._ready.set_exception(error)

    def _obey(self) -> bool:
        """Make the calls that have come; wait for one if the engine has nothing to do.

        False when the thread shall end.
        """
        while True:
            try:
                call = self._calls.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _step(self) -> None:
        """One step; a failed one ends those who took part, and the others go on."""
        try:
            completions = self.engine.step()
        except Exception:
            self._n_failed += 1
            if self._n_failed == _FAILURES:  # then it was not those who took part
                raise
            _log.exception("A step failed.")
            return
        self._n_failed = 0
        for completion in completions:
            answer = self._answers.pop(completion.request_id, None)
            if answer is not None:
                answer.end(completion)

    def _submit(self, job: Job, hear: Hear) -> list[int]:
        ids: list[int] = []
        n = len(job.samplings)
        try:
            for i, prompt in enumerate(job.prompts):
                answers = [_Answer(i * n + k, job, hear, self) for k in range(n)]
                new = self.engine.submit_samples(
                    prompt, job.max_new_tokens, job.samplings, stop_ids=job.stop_ids,
                    on_token=[answer.on_token for answer in answers], arrival=job.arrival,
                    top_logprobs=job.top_logprobs,
                )  # fmt: skip
                for answer, answer.request_id in zip(answers, new, strict=True):
                    self._answers[answer.request_id] = answer
                ids += new
        except Exception:  # a prompt that is refused takes the others with it
            for i in ids:
                del self._answers[i]
                self.engine.abort(i)
            raise
        return ids

    def _abort(self, ids: Sequence[int]) -> None:
        for i in ids:
            if i in self._answers:  # else it is over
                self.engine.abort(i)

    def _end(self) -> None:
        """End every request and make the calls that are left; the last that the thread does."""
        with self._lock:
            self._open = False  # from here on nothing comes into `_calls`
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call()
        for answer in self._answers.values():
            answer.give_up(self._why_closed)
