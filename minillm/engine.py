"""The engine: continuous batching. Requests come and go between two forward passes.

Sources: Yu et al. 2022 (Orca); Kwon et al. 2023 (vLLM), section 4.
Cost: a step reads all weights once, however many requests take part, and each request's cache
(`costs.decode_bytes` with its batch size): that is why many at once pay.

One step: the scheduler says who computes which tokens (`minillm.scheduler`); all of them go
through the model as one ragged row, each attending to its own blocks (`minillm.paged`); every
request whose tokens are all computed gets its next token.

A request carries all that is known of it. Whatever interrupts a step, Ctrl-C included, the engine
frees all blocks and starts again from the requests, so no token is lost or changed.
Not here: HTTP; several devices (`minillm.parallel.serving`).
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor

from minillm.checks import brief
from minillm.cuda_graphs import DecodeGraphs
from minillm.engine_config import EngineConfig
from minillm.generate import check_request
from minillm.kv_cache import Rows
from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.proposals import Proposals
from minillm.quantized_kv import rows_for
from minillm.request import Completion, Request
from minillm.sampling import Sampling
from minillm.scheduler import Scheduler, StepPlan
from minillm.steps import Taker, draw_tokens, forward
from minillm.timeline import Clock, Stats

_log = logging.getLogger(__name__)


class Engine:
    """Serve many requests with one model.

        engine = Engine(model, EngineConfig(n_blocks=256))
        ids = [engine.submit(prompt, 64) for prompt in prompts]
        completions = engine.run()                          # or engine.step() again and again

    The same request gives the same tokens whatever runs beside it, up to rounding: sums over a
    larger batch may be taken in another order.
    rows: another way to store keys and values (`minillm.kv_cache.Rows`). proposer: guesses in every
    step which tokens follow those of the running requests, `decoding` or not; those of the former
    are verified. Right ones save steps, wrong ones only cost time.
    """

    _forward = staticmethod(forward)  # an engine on several ranks tells the others first

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        rows: Callable[[Decoder, tuple[int, int]], Rows] | None = None,
        proposer: Callable[[Sequence[Request]], Sequence[Sequence[int]]] | None = None,
    ):
        c = config
        if c.cuda_graphs and getattr(c.drafter, "uses_states", False):
            raise ValueError(
                f"cuda_graphs keeps no states, from which a {type(c.drafter).__name__} guesses; "
                "leave it off."
            )
        self.model, self.config, self.clock = model, config, clock or Clock()
        paging = {"prefix_caching": c.prefix_caching, "rows": rows_for(c.kv_dtype, rows)}
        self.cache = PagedKVCache(model, c.n_blocks, c.block_size, backend=c.backend, **paging)
        self._graphs = DecodeGraphs(model, self.cache, c.max_seqs) if c.cuda_graphs else None
        self.scheduler = Scheduler(
            self.cache.manager, max_seqs=c.max_seqs, max_batch_tokens=c.max_batch_tokens,
            policy=c.policy, chunked_prefill=c.chunked_prefill, max_waiting=c.max_waiting,
        )  # fmt: skip
        self.stats = Stats()
        self._proposer = proposer or self._drafting()
        self._next_id, self._in_order = 0, True
        self._requests: dict[int, Request] = {}  # all that are not handed out, oldest first
        self._ended: list[Request] = []  # those of them that are over

    def _drafting(self) -> Proposals | None:
        if (c := self.config).drafter is None:
            return None
        sizes = {"n_blocks": c.n_blocks, "block_size": c.block_size}
        return Proposals(c.drafter, self.model, c.k, timeline=self.stats.timeline, **sizes)

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_ids: Iterable[int] = (),
        on_token: Callable[[int], None] | None = None,
        arrival: float | None = None,
    ) -> int:
        """Queue a request; returns its id.

        on_token: called with each token as it is delivered: when it is produced, or in a static
        batch when the batch is over. arrival: when the request came, on the engine's clock, if
        that was before this call.
        Raises ValueError or TypeError for what could never run, QueueFull beyond `max_waiting`.
        """
        options = {"stop_ids": stop_ids, "on_token": on_token, "arrival": arrival}
        return self.submit_samples(prompt_ids, max_new_tokens, [sampling], **options)[0]

    def submit_samples(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        samplings: Sequence[Sampling | None],
        *,
        stop_ids: Iterable[int] = (),
        on_token: Callable[[int], None] | None = None,
        arrival: float | None = None,
    ) -> list[int]:
        """Several completions of one prompt, one for each of `samplings`; returns their ids.

        The prompt is computed once. Its blocks are shared, and copied only where two samples
        write into the same one.
        """
        if not samplings:
            raise ValueError(
                "samplings is empty; give one Sampling (or None for greedy) for each completion."
            )
        ids, stop = check_request(self.model, prompt_ids, max_new_tokens, samplings[0], stop_ids)
        for sampling in samplings:
            check_request(self.model, ids, max_new_tokens, sampling, stop)
        if on_token is not None and not callable(on_token):
            raise TypeError(f"on_token is {brief(on_token)}; give a function of one token id.")
        arrival = self.clock.arrival(arrival)
        requests: list[Request] = []
        for i, sampling in enumerate(samplings, self._next_id):
            drawn = sampling is not None and not sampling.greedy
            uniforms = sampling.uniforms(max_new_tokens) if drawn else array("d")
            parent = requests[0] if requests else None
            rest = sampling, parent, on_token, uniforms, arrival
            requests.append(Request(i, list(ids), max_new_tokens, stop, *rest))
        if max_new_tokens:
            self.scheduler.check(requests[0], len(requests))
        with self._restored_if_interrupted():
            for request in requests:
                if max_new_tokens:
                    self.scheduler.submit(request)
                else:
                    request.finish_reason, request.ended = "length", arrival
                    self._ended.append(request)
            self._next_id += len(requests)
            self._requests |= {request.id: request for request in requests}
        return [request.id for request in requests]

    def abort(self, request_id: int) -> None:
        """End a request now, with the tokens it has; its Completion comes with the next `step`.

        ValueError if it is over.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason:
            raise ValueError(
                f"Request {brief(request_id)} is not running or waiting; it ended, or never was."
            )
        with self._restored_if_interrupted():
            self._end(request, "aborted")

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to hand out."""
        return bool(self._requests)

    def forget_prefixes(self) -> None:
        """Forget every known prefix, as if the engine were new. ValueError while it is busy."""
        if self.busy:
            raise ValueError("Requests are running or waiting; run them to their end first.")
        self._restore()
        if isinstance(self._proposer, Proposals):
            self._proposer = self._drafting()

    def run(self) -> dict[int, Completion]:
        """Step until nothing is left; returns the completions by request id.

        If it is interrupted, or a step fails, the next call goes on and returns these as well.
        """
        self._advance()
        while len(self._ended) < len(self._requests):
            self._advance()
        return {completion.request_id: completion for completion in self._hand_out()}

    def step(self) -> list[Completion]:
        """One forward pass for the requests that the scheduler chose; returns those now over.

        An error in the pass ends every request that took part as "aborted" and is raised; the
        next step goes on with the others.
        """
        self._advance()
        if self.config.policy == "static" and self.scheduler.running:
            return []  # the answers of a static batch come together
        return self._hand_out()

    @torch.inference_mode()
    def _advance(self) -> None:
        with self._restored_if_interrupted():
            start = self.clock.now()
            self._propose()
            plan = self.scheduler.schedule()
            if plan.work:
                try:
                    computed = self._forward(plan, self.model, self.cache, self._graphs)
                except Exception as error:  # out of memory, say: one cannot tell whose fault it was
                    for work in plan.work:
                        self._end(work.request, "aborted", error)
                    raise
                self.clock.passed(*plan.counts)
                self.stats.record(plan, self.scheduler, start, self.clock.now())
                self._produce(plan, *computed)
            self._deliver()

    @contextmanager
    def _restored_if_interrupted(self) -> Iterator[None]:
        """If the block is left by an exception, start again from the requests.

        If that is interrupted too, the next call does it.
        """
        if not self._in_order:
            self._restore()
        self._in_order = False
        try:
            yield
        except BaseException:
            self._restore()
            raise
        self._in_order = True

    def _restore(self) -> None:
        requests = list(self._requests.values())
        for request in requests:
            if not request.finish_reason and request.end_reason:  # interrupted just before its end
                request.ended = request.times[request.n_produced - 1]
                request.finish_reason = request.end_reason
        ended = [request for request in requests if request.finish_reason]
        self._ended = sorted(ended, key=lambda request: not request.delivered)  # delivered first
        self.scheduler.restart(request for request in requests if not request.finish_reason)
        if self._graphs is not None:
            self._graphs.claim_padding()
        self._in_order = True

    def _propose(self) -> None:
        if self._proposer is None:
            return
        running = list(self.scheduler.running)
        try:
            drafts = dict(zip(running, self._proposer(running), strict=True))
        except Exception:  # guesses are no part of the answer
            _log.exception("The drafter failed; this step has no guesses.")
            drafts = {}
        for request in running:
            # One token comes without a guess, and no more than max_new_tokens are wanted.
            room = request.max_new_tokens - request.n_produced - 1 if request.decoding else 0
            request.guesses = list(drafts.get(request, ()))[:room]

    def _produce(
        self, plan: StepPlan, logits: Tensor, best: list[int], states: Tensor | None
    ) -> None:
        """Give tokens to every request whose tokens are all computed."""
        takers: list[Taker] = []
        row = 0
        for work in plan.work:
            request, rows = work.request, range(row, row + work.n_logits)
            row = rows.stop
            self.scheduler.manager.remember(request.table, request.ids)
            if rows:
                # When a prompt is done, its samples start from the same logits.
                started = [] if request.n_produced else self.scheduler.fork(request)
                takers += [(each, rows) for each in (request, *started)]
        now = self.clock.now()
        drawn = draw_tokens(takers, logits, best)
        for (request, rows), tokens in zip(takers, drawn, strict=True):
            try:
                n_wrong = request.accept(tokens, now)
                request.state = None if states is None else states[rows[-1 - n_wrong]]
                if self.config.policy == "continuous":
                    request.deliver()
            except Exception as error:  # the request's own trouble; the others go on
                _log.exception("Request %d ends: a token could not be delivered.", request.id)
                self._end(request, "aborted", error)
            else:
                if request.end_reason:
                    self._end(request, request.end_reason)
                else:
                    self.scheduler.manager.rewind(request.table, n_wrong)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        request.error = None if error is None else f"{type(error).__name__}: {error}"
        request.ended = self.clock.now()
        request.finish_reason = reason  # from here on the request is over
        self.scheduler.finish(request)
        self._ended.append(request)

    def _deliver(self) -> None:
        """Hand the tokens of ended requests to their callbacks: in a static batch, all at once."""
        static = self.config.policy == "static"
        if static and self.scheduler.running:
            return
        now = self.clock.now()
        # Those that ended since the last time stand at the end of the list.
        new = list(takewhile(lambda request: not request.delivered, reversed(self._ended)))
        for request in reversed(new):
            if static:
                request.times, request.ended = [now] * request.n_produced, now
            try:
                request.deliver()
            except Exception:
                _log.exception("Request %d: a token could not be delivered.", request.id)
            request.delivered = True

    def _hand_out(self) -> list[Completion]:
        if not self._ended:
            return []
        completions = [request.completion() for request in self._ended]
        left = {i: r for i, r in self._requests.items() if not r.finish_reason}
        self._requests, self._ended = left, []
        return completions
