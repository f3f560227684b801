"""The engine: continuous batching. Requests come and go between two forward passes.

Sources: Yu et al. 2022 (Orca); Kwon et al. 2023 (vLLM), section 4.
Cost: a step reads all weights once, however many requests take part, and each request's cache
(`costs.decode_bytes` with its batch size): that is why many at once pay.

One step: the scheduler says who computes which tokens; all of them go through the model as one
ragged row, each attending to its own blocks; every request whose tokens are all computed gets its
next token.
Not here: HTTP; several devices (`minillm.parallel.serving`); starting again after an interrupt
(`minillm.serving.recovery`).
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from minillm.generation import prompt_logprobs
from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.quantization.kv_cache import storage_for
from minillm.sampling import Sampling, TokenLogprobs, check_sampling
from minillm.serving.cuda_graphs import DecodeGraphs
from minillm.serving.engine_config import EngineConfig
from minillm.serving.model_runner import draw_tokens, drawn_logprobs, forward
from minillm.serving.proposals import Proposals, Proposer, give_drafts
from minillm.serving.recovery import Recovery, restarted
from minillm.serving.request import Completion, OnToken, Request, parallel_samples
from minillm.serving.scheduler import Scheduler
from minillm.serving.step_plan import StepPlan
from minillm.serving.timeline import Clock, Stats
from minillm.tools.checks import brief, check_request, check_whole

_log = logging.getLogger(__name__)


class Engine:
    """Serve many requests with one model.

        engine = Engine(model, EngineConfig(n_blocks=256))
        ids = [engine.submit(prompt, 64) for prompt in prompts]
        completions = engine.run()                          # or engine.step() again and again

    The same request gives the same tokens whatever runs beside it, up to rounding: sums over a
    larger batch may be taken in another order.
    proposer: proposes draft tokens in every step (`minillm.serving.proposals`), by default with
    the drafter of the config. Right ones save steps, wrong ones only cost time.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        proposer: Proposer | None = None,
    ):
        c = config
        if c.cuda_graphs and c.drafter is not None and c.drafter.uses_states:
            raise ValueError(
                f"cuda_graphs keeps no hidden states, from which a {type(c.drafter).__name__} "
                "drafts; leave it off."
            )
        self.model, self.config, self.clock = model, config, clock or Clock()
        self.cache = self._new_cache()
        self._graphs = DecodeGraphs(model, self.cache, c.max_seqs) if c.cuda_graphs else None
        self.scheduler = Scheduler(
            self.cache.manager, max_seqs=c.max_seqs, max_batch_tokens=c.max_batch_tokens,
            policy=c.policy, chunked_prefill=c.chunked_prefill, max_waiting=c.max_waiting,
        )  # fmt: skip
        self.stats = Stats()
        self._proposer = proposer or self._drafting()
        self._next_id = 0
        self._requests: dict[int, Request] = {}  # all that are not handed out, oldest first
        self._ended: list[Request] = []  # those of them that are over
        self._recovery = Recovery(self._restore)

    def _new_cache(self) -> PagedKVCache:
        c = self.config
        return PagedKVCache(
            self.model, c.n_blocks, c.block_size, prefix_caching=c.prefix_caching,
            backend=c.backend, storage=storage_for(c.kv_dtype),
        )  # fmt: skip

    def _drafting(self) -> Proposals | None:
        c = self.config
        if c.drafter is None:
            return None
        return Proposals(c.drafter, self.model, c.k, n_blocks=c.n_blocks, block_size=c.block_size)

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_ids: Iterable[int] = (),
        on_token: OnToken | None = None,
        arrival: float | None = None,
        top_logprobs: int | None = None,
    ) -> int:
        """Queue a request; returns its id.

        on_token: called with each token as it is delivered: when it is produced, or in a static
        batch when the batch is over. If it returns True, the answer ends with this token. arrival:
        when the request came, on the engine's clock, if that was before this call. top_logprobs:
        also give each token's log-probability, and those of so many likeliest tokens.
        Raises ValueError or TypeError for what could never run, QueueFull beyond `max_waiting`.
        """
        (request_id,) = self.submit_samples(
            prompt_ids, max_new_tokens, [sampling], stop_ids=stop_ids, on_token=on_token,
            arrival=arrival, top_logprobs=top_logprobs,
        )  # fmt: skip
        return request_id

    def submit_samples(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        samplings: Sequence[Sampling | None],
        *,
        stop_ids: Iterable[int] = (),
        on_token: OnToken | Sequence[OnToken | None] | None = None,
        arrival: float | None = None,
        top_logprobs: int | None = None,
    ) -> list[int]:
        """Several completions of one prompt, one for each of `samplings`; returns their ids.

        The prompt is computed once. Its blocks are shared, and copied only where two samples
        write into the same one. on_token: one function for all, or a list with one for each.
        """
        if not samplings:
            raise ValueError(
                "samplings is empty; give one Sampling (or None for greedy) for each completion."
            )
        ids, stop = check_request(self.model.config, prompt_ids, max_new_tokens, stop_ids)
        for sampling in samplings:
            check_sampling(sampling)
        if top_logprobs is not None:
            check_whole("top_logprobs", top_logprobs, least=0)
        requests = parallel_samples(
            self._next_id, ids, max_new_tokens, samplings, stop_ids=stop, on_token=on_token,
            arrival=self.clock.arrival(arrival), top_logprobs=top_logprobs,
        )  # fmt: skip
        if max_new_tokens:  # all have one prompt, so one check is enough
            self.scheduler.check(requests[0], len(requests))
        self._take(requests)
        return [request.id for request in requests]

    def _take(self, requests: Sequence[Request]) -> None:
        """Queue checked requests; one that asks for no token is over already."""
        with self._recovery.guard():
            for request in requests:
                if request.max_new_tokens:
                    self.scheduler.submit(request)
                else:
                    request.finish_reason, request.ended_at = "length", request.arrival
                    self._ended.append(request)
            self._next_id += len(requests)
            self._requests |= {request.id: request for request in requests}

    def abort(self, request_id: int) -> None:
        """End a request now, with the tokens it has; its Completion comes with the next `step`.

        ValueError if it is over. RuntimeError in the middle of a step, that is, in `on_token`.
        """
        if self._recovery.guarding:
            raise RuntimeError(
                "abort was called in on_token, in the middle of a step; return True there to end "
                "the answer, or abort between two steps."
            )
        request = self._requests.get(request_id)
        if request is None or request.finish_reason:
            raise ValueError(
                f"Request {brief(request_id)} is not running or waiting; it ended, or never was."
            )
        with self._recovery.guard():
            self._end(request, "aborted")

    def request(self, request_id: int) -> Request:
        """A request that is not handed out yet, only to look at: its tokens and logprobs so far."""
        return self._requests[request_id]

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to hand out."""
        return bool(self._requests)

    def forget_prefixes(self) -> None:
        """Forget every known prefix, as if the engine were new. ValueError while it is busy."""
        if self.busy:
            raise ValueError("Requests are running or waiting; run them to their end first.")
        self._recovery.restore()
        if self.config.drafter is not None:
            self._proposer = self._drafting()

    def score(self, prompt_ids: Sequence[int], n_top: int = 0) -> list[TokenLogprobs]:
        """`prompt_logprobs` of the engine's model: a pass of its own, beside the requests."""
        return prompt_logprobs(self.model, prompt_ids, n_top, backend=self.config.backend)

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
        """One step: propose, plan, compute, produce, deliver."""
        with self._recovery.guard():
            start = self.clock.now()
            if self._proposer is not None:
                give_drafts(self._proposer, self.scheduler.running)
            plan = self.scheduler.schedule()
            if plan.work:
                plan.begin(start)
                logits, best, hidden = self._computed(plan)
                self.clock.passed(*plan.counts)
                self.stats.record(plan, self.scheduler, start, self.clock.now())
                self._produce(plan, logits, best, hidden)
                if self._proposer is not None:
                    self._proposer.observe(self.stats.timeline[-1])
            self._deliver()

    def _computed(self, plan: StepPlan) -> tuple[Tensor, list[int], Tensor | None]:
        try:
            return self._forward(plan)
        except Exception as error:  # out of memory, say: one cannot tell whose fault it was
            for work in plan.work:
                self._end(work.request, "aborted", error)
            raise

    def _forward(self, plan: StepPlan) -> tuple[Tensor, list[int], Tensor | None]:
        """`model_runner.forward`; an engine on several ranks tells the others first."""
        return forward(plan.items, plan.copies, self.model, self.cache, self._graphs)

    def _produce(
        self, plan: StepPlan, logits: Tensor, best: list[int], hidden: Tensor | None
    ) -> None:
        """Give tokens to every request whose tokens are all computed."""
        rows: dict[Request, range] = {}
        for work in plan.work:
            request = work.request
            # Blocks that are full now may serve later requests.
            self.scheduler.manager.remember(request.table, request.ids)
            if work.rows:
                rows[request] = work.rows
                if not request.n_produced:  # its prompt is done: its samples start from it
                    rows |= dict.fromkeys(self.scheduler.fork(request), work.rows)
        now = self.clock.now()
        drawn = draw_tokens(rows, logits, best)
        logprobs = drawn_logprobs(rows, logits, drawn)
        for request, tokens in drawn.items():
            try:
                n_wrong = request.accept(tokens, now, logprobs.get(request, ()))
                newest = rows[request][-1 - n_wrong]
                request.hidden = None if hidden is None else hidden[newest]
                if self.config.policy == "continuous":
                    request.deliver()
            except Exception as error:  # the request's own trouble; the others go on
                _log.exception("Request %d ends: a token could not be delivered.", request.id)
                self._end(request, "aborted", error)
            else:
                if request.reached:
                    self._end(request, request.reached)
                else:  # forget the keys and values of wrong draft tokens
                    self.scheduler.manager.rewind(request.table, n_wrong)

    def _restore(self) -> None:
        self._ended = restarted(list(self._requests.values()), self.scheduler)
        if self._graphs is not None:
            self._graphs.claim_padding()

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        request.error = None if error is None else f"{type(error).__name__}: {error}"
        request.ended_at = self.clock.now()
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
        new = list(takewhile(lambda request: not request.all_delivered, reversed(self._ended)))
        for request in reversed(new):
            if static:
                request.times, request.ended_at = [now] * request.n_produced, now
            try:
                request.deliver()
            except Exception:
                _log.exception("Request %d: a token could not be delivered.", request.id)
            if request.stopped:
                request.finish_reason = "stop"
            request.all_delivered = True

    def _hand_out(self) -> list[Completion]:
        if not self._ended:
            return []
        completions = [request.completion() for request in self._ended]
        left = {i: r for i, r in self._requests.items() if not r.finish_reason}
        self._requests, self._ended = left, []
        return completions
