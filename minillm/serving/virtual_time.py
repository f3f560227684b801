"""Virtual time: the clock moves as for a large model, and a small one or none makes the tokens.

Each step takes what the roofline says that a large model's step takes on other hardware, so a
load test of a 70B model on eight GPUs runs on a laptop.

    VirtualClock    for an engine whose tokens a small model makes
    VirtualEngine   the scheduler and the blocks of an engine, with no model at all: faster

Not here: attention scores, launches, the time between steps.
"""

from collections.abc import Callable, Sequence

from minillm import costs
from minillm.blocks import BlockManager
from minillm.config import ModelConfig
from minillm.hardware import Hardware, roofline_seconds
from minillm.serving.request import Completion, Request
from minillm.serving.scheduler import Scheduler
from minillm.serving.step_plan import StepPlan
from minillm.serving.timeline import Clock, Stats


def step_seconds(
    config: ModelConfig, hardware: Hardware, prefilled: int, decoded: int, context: int, dtype: str
) -> float:
    """Roofline time of a step over so many tokens, with `context` tokens in the caches.

    The weights and the caches are read once; each token takes 2 FLOPs per matrix parameter.
    Attention scores, a small part, are not counted. The head is counted for every token, although
    only the last one of a prompt needs it.
    """
    read = costs.weight_read_bytes(config, dtype) + costs.kv_cache_bytes(config, 1, context, dtype)
    flops = 2 * costs.matmul_params(config) * (prefilled + decoded)
    return roofline_seconds(hardware, flops, read, dtype)


class VirtualClock(Clock):
    """Time as it would pass for another model on other hardware: only steps take time."""

    def __init__(self, config: ModelConfig, hardware: Hardware, dtype: str = "float16"):
        self._config, self._hardware, self._dtype = config, hardware, dtype
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        numbers = prefilled, decoded, context
        self._now += step_seconds(self._config, self._hardware, *numbers, self._dtype)


class VirtualEngine:
    """The scheduler, the blocks and the clock of a large model's engine, without its model.

    Every token is token 0, and a step takes `step_seconds`. When requests come and go depends on
    lengths alone, so the times are those of an `Engine` with the same limits on a `VirtualClock`.
    n_blocks: as many as fit beside the weights into `hardware`, unless given. policy,
    chunked_prefill: as for `Scheduler`. on_plan: called with each step's plan when its blocks are
    reserved and nothing of it is counted yet.
    Not here: stop ids, sampling, draft tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        dtype: str = "float16",
        *,
        max_seqs: int = 64,
        max_batch_tokens: int = 512,
        n_blocks: int | None = None,
        block_size: int = 16,
        prefix_caching: bool = False,
        policy: str = "continuous",
        chunked_prefill: bool = True,
        on_plan: Callable[[StepPlan], None] | None = None,
    ):
        if n_blocks is None:
            n_blocks = costs.max_batch_size(config, block_size, hardware.memory_bytes, dtype)
        manager = BlockManager(n_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            manager,
            max_seqs=max_seqs,
            max_batch_tokens=max_batch_tokens,
            policy=policy,
            chunked_prefill=chunked_prefill,
        )
        self.clock, self.stats = VirtualClock(config, hardware, dtype), Stats()
        self._on_plan, self._next_id = on_plan, 0
        self._ended: list[Request] = []  # over, and not handed out yet

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: None = None,
        arrival: float | None = None,
    ) -> int:
        """Queue a request; returns its id. Raises ValueError for what could never run."""
        if not prompt_ids or max_new_tokens < 1 or sampling is not None:
            raise ValueError("Give at least one prompt token, one new token, and no sampling.")
        arrival = self.clock.arrival(arrival)
        request = Request(self._next_id, list(prompt_ids), max_new_tokens, arrival=arrival)
        self.scheduler.check(request)
        self.scheduler.submit(request)
        self._next_id += 1
        return request.id

    def step(self) -> list[Completion]:
        """Let a step's time pass; returns the requests that are over, a static batch as a whole."""
        scheduler, start = self.scheduler, self.clock.now()
        plan = scheduler.schedule()
        if not plan.work:
            return []
        plan.begin(start)
        if self._on_plan is not None:
            self._on_plan(plan)
        # What the model would do: the tokens are computed, and time passes.
        for work in plan.work:
            work.request.table.n_tokens += len(work.tokens)
        self.clock.passed(*plan.counts)
        self.stats.record(plan, scheduler, start, self.clock.now())
        # Token 0 for each request whose tokens are all computed.
        for work in plan.work:
            request = work.request
            scheduler.manager.remember(request.table, request.ids)
            if work.rows:
                request.accept([0], self.clock.now())
            if request.reached:
                request.ended_at, request.finish_reason = self.clock.now(), request.reached
                scheduler.finish(request)
                self._ended.append(request)
        return self._hand_out()

    def _hand_out(self) -> list[Completion]:
        """What is over; the answers of a static batch come together, as an `Engine` gives them."""
        if self.scheduler.policy == "static":
            if self.scheduler.running:
                return []
            for request in self._ended:
                request.ended_at = self.clock.now()
                request.times = [request.ended_at] * request.n_produced
        ended, self._ended = self._ended, []
        return [request.completion() for request in ended]


def saturation_rate(
    config: ModelConfig,
    hardware: Hardware,
    n_prompt: float,
    n_output: float,
    max_seqs: int,
    dtype: str,
) -> float:
    """Requests per second up to which no queue grows, for mean lengths of prompts and answers.

    It is the safe end of the knee. With all `max_seqs` places taken, a decode step of
    `step_seconds` gives max_seqs tokens. One request costs its prefill and its share of
    n_output - 1 such steps; the rate is one over that. Prefill and decode are counted as if they
    took turns. Where chunks of prompts ride along in decode steps that wait for memory, the knee
    comes later (lesson 08 predicts it).
    """
    prefill = 2 * costs.matmul_params(config) * n_prompt / hardware.peak(dtype)
    context = round(max_seqs * (n_prompt + n_output / 2))
    step = step_seconds(config, hardware, 0, max_seqs, context, dtype)
    return 1 / (prefill + (n_output - 1) * step / max_seqs)
