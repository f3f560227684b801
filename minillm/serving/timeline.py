"""What happened when: the engine's clock, a line for every step, and counts. No tensors."""

import math
import time
from collections import deque
from dataclasses import dataclass, field

from minillm.serving.scheduler import Scheduler
from minillm.serving.step_plan import StepPlan
from minillm.tools.checks import brief


class Clock:
    """The time that requests are stamped with. A simulation replaces it (`virtual_time`)."""

    def now(self) -> float:
        return time.perf_counter()

    def arrival(self, given: float | None) -> float:
        """When a request came: now, unless a time in seconds on this clock is given."""
        if given is None:
            return self.now()
        if not isinstance(given, (int, float)) or not math.isfinite(given):
            raise ValueError(
                f"arrival is {brief(given)}; give a time in seconds on the engine's clock."
            )
        return given

    def wait_until(self, moment: float) -> None:
        """Let the time pass until `moment`, if that lies ahead."""
        time.sleep(max(0.0, moment - self.now()))

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        """A step over these tokens has just been computed, with `context` cached tokens."""


@dataclass(frozen=True)
class Step:
    """A line of the timeline: what one step did, and how things stood after it."""

    start: float
    end: float
    prefilled: int  # tokens computed for prompts
    decoded: int  # tokens computed for requests that decode
    running: int
    waiting: int
    free_blocks: int
    work: tuple[tuple[int, int, bool], ...]  # (request id, tokens computed, whether it decoded)
    context: int  # cached tokens of the requests that took part


@dataclass
class Stats:
    """Counts since the engine was made."""

    peak_blocks: int = 0
    preemptions: int = 0
    # Prompt tokens of admitted requests, and those of them found in the prefix cache. A request
    # that comes back after a preemption is not counted again.
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    steps: int = 0
    slots: int = 0  # allocated slots, summed over all steps
    empty_slots: int = 0  # allocated slots that held no token, likewise
    timeline: deque[Step] = field(default_factory=lambda: deque(maxlen=100_000))

    @property
    def kv_waste(self) -> float:
        """Share of the allocated slots that held no token, over all steps."""
        return self.empty_slots / self.slots if self.slots else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        hits, queries = self.prefix_hit_tokens, self.prefix_query_tokens
        return hits / queries if queries else 0.0

    def record(self, plan: StepPlan, scheduler: Scheduler, start: float, end: float) -> None:
        """Count a step that has just been computed, before its tokens are drawn."""
        slots, empty = scheduler.slots()
        self.slots += slots
        self.empty_slots += empty
        self.steps += 1
        self.peak_blocks = max(self.peak_blocks, slots // scheduler.manager.block_size)
        self.preemptions = scheduler.preemptions
        self.prefix_query_tokens = scheduler.query_tokens
        self.prefix_hit_tokens = scheduler.hit_tokens
        prefilled, decoded, context = plan.counts
        self.timeline.append(
            Step(
                start=start,
                end=end,
                prefilled=prefilled,
                decoded=decoded,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_blocks=scheduler.manager.n_available,
                work=tuple((w.request.id, len(w.tokens), w.decoding) for w in plan.work),
                context=context,
            )
        )
