"""The engine: continuous batching. Requests come and go between two forward passes; the batch never waits for one of them.

Sources: Yu et al. 2022 (Orca); Kwon et al. 2023 (vLLM), section 4.
Cost: a step reads all weights once, whatever the number of requests in it, and each request's cache (`costs.decode_bytes`
with its batch size): that is why many at once pay.

One step: the scheduler says who computes how many tokens (`minillm.scheduler`); all of them go through the model as one
ragged row of tokens, each attending to its own blocks (`minillm.paged`); whoever has nothing left to compute gets a token.
Not here: HTTP, streaming to clients, several devices.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from minillm.flash import why_not_triton
from minillm.generate import check_request
from minillm.model import Decoder
from minillm.paged import BlockTable, PagedBatch, PagedKVCache
from minillm.sampling import Sampling, sample
from minillm.scheduler import Plan, Request, Scheduler


@dataclass(frozen=True)
class EngineConfig:
    """How much memory and how many requests at once.

    n_blocks blocks of block_size tokens are the cache (`costs.kv_cache_bytes(config, 1, n_blocks * block_size, dtype)`).
    max_seqs: requests running at once. max_batch_tokens: tokens computed in one step, prompts included; more is better
    throughput, fewer is a shorter pause for those who decode. policy "static" is the baseline: a batch starts when the last
    is over, and its answers come when its longest is done. cuda_graphs: replay decode steps on a GPU instead of launching
    each kernel.
    """

    n_blocks: int
    block_size: int = 16
    max_seqs: int = 64
    max_batch_tokens: int = 512
    policy: str = "continuous"
    prefix_caching: bool = True
    chunked_prefill: bool = True
    cuda_graphs: bool = False
    backend: str = "auto"


@dataclass(frozen=True)
class Completion:
    """What became of a request. Times in seconds, from `submit` on: ttft to the first token, latency to the last; tpot is
    the mean time between two tokens, NaN if there were fewer than two (and ttft NaN without any).

    finish_reason: "stop" (a stop id, which is the last token), "length", or "aborted" (by `abort`, or by an error).
    """

    request_id: int
    n_prompt: int
    tokens: list[int]
    finish_reason: str
    ttft: float
    tpot: float
    latency: float
    arrival: float
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """A line of the timeline: what one step did, and how things stood after it."""

    start: float
    end: float
    prefilled: int
    decoded: int
    running: int
    waiting: int
    free_blocks: int
    work: tuple[tuple[int, int, bool], ...]  # (request id, tokens computed, whether it was decoding)
    context: int  # tokens in the caches of those who took part


@dataclass
class Stats:
    """Counts since the engine was made. kv_waste: share of the allocated slots that held no token, over all steps."""

    peak_blocks: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    steps: int = 0
    timeline: deque[Step] = field(default_factory=lambda: deque(maxlen=100_000))
    _slots: int = 0
    _empty: int = 0

    @property
    def kv_waste(self) -> float:
        return self._empty / self._slots if self._slots else 0.0


class Clock:
    """The time that requests are stamped with. A simulation replaces it by one that `passed` moves on."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Nothing to do before `moment`."""
        time.sleep(max(0.0, moment - self.now()))

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        """A step with these tokens has just been computed, in the presence of `context` cached ones."""


@dataclass
class _Times:
    arrival: float
    first: float = math.nan
    last: float = math.nan


class Engine:
    """Serve many requests with one model.

        engine = Engine(model, EngineConfig(n_blocks=256))
        ids = [engine.submit(prompt, 64) for prompt in prompts]
        completions = engine.run()                          # or engine.step() again and again

    The same request gives the same tokens whoever runs beside it, up to rounding: sums over a larger batch may be taken in
    another order. Sampling uses a generator of its own for each request.
    """

    def __init__(self, model: Decoder, config: EngineConfig, *, clock: Clock | None = None):
        c = config
        self.model, self.config, self.clock = model, config, clock or Clock()
        self.cache = PagedKVCache(model, c.n_blocks, c.block_size, prefix_caching=c.prefix_caching, backend=c.backend)
        self._graphs = _DecodeGraphs(model, self.cache, c.max_seqs) if c.cuda_graphs else None
        self.scheduler = Scheduler(
            self.cache.manager, max_seqs=c.max_seqs, max_batch_tokens=c.max_batch_tokens, policy=c.policy,
            chunked_prefill=c.chunked_prefill,
        )  # fmt: skip
        self.stats = Stats()
        self._next_id = 0
        self._times: dict[int, _Times] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._ended: list[tuple[Request, str, str | None]] = []  # over, but not handed out yet

    def submit(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, sampling: Sampling | None = None, stop_ids: Iterable[int] = (),
        arrival: float | None = None,
    ) -> int:  # fmt: skip
        """Queue a request; returns its id. Raises ValueError or TypeError for what could never run.

        arrival: when it came, on the engine's clock, if that was before this call.
        """
        return self.submit_samples(prompt_ids, max_new_tokens, [sampling], stop_ids=stop_ids, arrival=arrival)[0]

    def submit_samples(
        self, prompt_ids: Sequence[int], max_new_tokens: int, samplings: Sequence[Sampling | None], *,
        stop_ids: Iterable[int] = (), arrival: float | None = None,
    ) -> list[int]:  # fmt: skip
        """Several completions of one prompt, one for each of `samplings`; returns their ids.

        The prompt is computed once. Its blocks are shared, and copied only where two samples write into the same one.
        """
        if not samplings:
            raise ValueError("samplings is empty; give one Sampling (or None for greedy) for each completion.")
        ids, stop = check_request(self.model, prompt_ids, max_new_tokens, samplings[0], stop_ids)
        requests: list[Request] = []
        for sampling in samplings:
            check_request(self.model, ids, max_new_tokens, sampling, stop)
            parent = requests[0] if requests else None
            requests.append(Request(self._next_id + len(requests), list(ids), max_new_tokens, stop, sampling, parent))
        for request in requests:
            if max_new_tokens == 0:
                self._ended.append((request, "length", None))
            else:
                self.scheduler.submit(request)  # refuses the first or none: they are alike
        self._next_id += len(requests)
        for request in requests:
            self._times[request.id] = _Times(self.clock.now() if arrival is None else arrival)
            if request.sampling is not None and max_new_tokens > 0:
                self._generators[request.id] = request.sampling.generator(self.model.device)
        return [request.id for request in requests]

    def abort(self, request_id: int) -> None:
        """End a request now, with the tokens it has; its Completion comes with the next `step`. ValueError if it is over."""
        request = self.scheduler.find(request_id)
        if request is None:
            raise ValueError(f"Request {request_id!r} is not running or waiting; it ended, or never was.")
        self._end(request, "aborted")

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to hand out."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._ended)

    def run(self) -> dict[int, Completion]:
        """Step until nothing is left; returns the completions by request id."""
        completions: dict[int, Completion] = {}
        while self.busy:
            completions |= {completion.request_id: completion for completion in self.step()}
        return completions

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One forward pass for whoever the scheduler chose; returns the requests that are over."""
        start = self.clock.now()
        plan = self.scheduler.schedule()
        if plan.work:
            try:
                logits, best = self._forward(plan)
            except Exception as error:  # out of memory, say: whose fault it was can't be told, so all who took part end
                for request, _ in plan.work:
                    self._end(request, "aborted", f"{type(error).__name__}: {error}")
            else:
                self._record(plan, start)
                self._produce(plan, logits, best)
        if self.config.policy == "static" and self.scheduler.running:
            return []  # the answers of a static batch come together
        ended, self._ended = self._ended, []
        return [self._completion(*item) for item in ended]

    def _forward(self, plan: Plan) -> tuple[Tensor, list[int]]:
        """Compute the plan's tokens; returns the logits (n_requests, V) after the last token of each, and the likeliest
        next tokens. These are needed at once, so a GPU is done when this returns."""
        tables, n_new = [request.table for request, _ in plan.work], [n for _, n in plan.work]
        self.cache.copy(plan.copies)
        ids = [request.ids[request.table.n_tokens : request.table.n_tokens + n] for request, n in plan.work]
        if self._graphs is not None and max(n_new) == 1:
            logits = self._graphs.run(tables, [i for (i,) in ids])
        else:
            tokens = torch.tensor([list(chain(*ids))], device=self.model.device)  # (1, N)
            hidden = self.model.hidden(tokens, self.cache.batch(tables, n_new))[0]
            last = torch.tensor(n_new, device=hidden.device).cumsum(0) - 1
            logits = self.model.head(hidden[last])
        return logits, logits.argmax(-1).tolist()

    def _produce(self, plan: Plan, logits: Tensor, best: list[int]) -> None:
        """Give a token to every request that has computed all it had."""
        for (request, _), row, likeliest in zip(plan.work, logits, best, strict=True):
            self.scheduler.manager.remember(request.table, request.ids)
            if request.n_pending == 0:
                started = self.scheduler.fork(request) if len(request.ids) == request.n_prompt else []
                for each in (request, *started):  # samples of one prompt start from the same logits
                    self._add_token(each, row, likeliest)

    def _add_token(self, request: Request, logits: Tensor, best: int) -> None:
        try:
            drawn = best
            if request.sampling is not None and request.sampling.temperature > 0:
                drawn = int(sample(logits, request.sampling, self._generators[request.id]))
        except Exception as error:  # this request's own trouble; the others go on
            self._end(request, "aborted", f"{type(error).__name__}: {error}")
            return
        request.ids.append(drawn)
        times = self._times[request.id]
        times.last = self.clock.now()
        if len(request.ids) == request.n_prompt + 1:
            times.first = times.last
        if drawn in request.stop_ids:
            self._end(request, "stop")
        elif len(request.ids) == request.n_prompt + request.max_new_tokens:
            self._end(request, "length")

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        self.scheduler.finish(request)
        self._generators.pop(request.id, None)
        self._ended.append((request, reason, error))

    def _completion(self, request: Request, reason: str, error: str | None) -> Completion:
        times, n = self._times.pop(request.id), len(request.tokens)
        if self.config.policy == "static":
            times.last = self.clock.now()
        tpot = (times.last - times.first) / (n - 1) if n > 1 else math.nan
        latency = (times.last if n else self.clock.now()) - times.arrival
        return Completion(
            request.id, request.n_prompt, request.tokens, reason, times.first - times.arrival, tpot, latency, times.arrival, error
        )

    def _record(self, plan: Plan, start: float) -> None:
        work = tuple((request.id, n, n == 1 and request.table.n_tokens > request.n_prompt) for request, n in plan.work)
        decoded = sum(decoding for _, _, decoding in work)
        prefilled, context = sum(n for _, n, _ in work) - decoded, sum(request.table.n_tokens for request, _ in plan.work)
        self.clock.passed(prefilled, decoded, context)
        stats = self.stats
        slots, empty = self.scheduler.slots()
        stats._slots += slots
        stats._empty += empty
        stats.steps += 1
        stats.peak_blocks = max(stats.peak_blocks, slots // self.config.block_size)
        stats.preemptions, stats.prefix_hit_tokens = self.scheduler.preemptions, self.scheduler.hit_tokens
        stats.timeline.append(
            Step(
                start, self.clock.now(), prefilled, decoded, len(self.scheduler.running), len(self.scheduler.waiting),
                self.cache.manager.n_available, work, context,
            )
        )  # fmt: skip


class _DecodeGraphs:
    """Decode steps as CUDA graphs, captured once for a few batch sizes and replayed with new numbers in the same tensors.

    A decode step of a small model is hundreds of kernels of microseconds each; launching them one by one from Python takes
    longer than running them. Rows beyond the requests at hand are padding: a sequence of one token in a block of its own.
    """

    def __init__(self, model: Decoder, cache: PagedKVCache, max_seqs: int):
        if cache.k.device.type != "cuda":
            raise ValueError(f"cuda_graphs needs a model on a CUDA device; this one is on {cache.k.device}. Leave it off.")
        if cache.backend not in ("auto", "triton") or why_not_triton(cache.k[0, 0], 1.0):
            raise ValueError("cuda_graphs needs the backend 'triton', whose launches do not depend on the numbers; leave it off.")
        self._model, self._cache = model, cache
        self._sizes = sorted({min(2**i, max_seqs) for i in range(max_seqs.bit_length() + 1)})
        limit = min(cache.manager.allocator.n_blocks, -(-model.config.max_seq_len // cache.manager.block_size))
        self._width = limit
        self._padding = BlockTable([cache.manager.allocator.allocate()])
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, PagedBatch, Tensor]] = {}

    def run(self, tables: list[BlockTable], tokens: list[int]) -> Tensor:
        """Logits (n_requests, V) after one more token of each."""
        n = len(tables)
        size = next(size for size in self._sizes if size >= n)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        graph, static_tokens, batch, logits = self._captured[size]
        batch.refill([*tables, *[self._padding] * (size - n)])
        static_tokens.copy_(torch.tensor([tokens + [0] * (size - n)]))
        graph.replay()
        for table in tables:
            table.n_tokens += 1
        return logits[:n]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, PagedBatch, Tensor]:
        tokens = torch.zeros(1, size, dtype=torch.int64, device=self._cache.k.device)
        batch = PagedBatch(self._cache, [self._padding] * size, [1] * size, width=self._width)

        def forward() -> Tensor:
            logits = self._model(tokens, batch)[0]
            self._padding.n_tokens = 0  # the forward pass has counted it on
            return logits

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile the kernels and reserve the libraries' workspaces outside the graph
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = forward()
        return graph, tokens, batch, logits
