"""Virtual time without a model: the same times as the real engine's, loads that react, bursts."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from models import lively

from minillm import Engine, EngineConfig, Hardware, ModelConfig, costs
from minillm.serving.metrics import summarize
from minillm.serving.virtual_time import VirtualClock, VirtualEngine
from minillm.serving.workload import TimedRequest, bursty_arrivals, poisson_arrivals, serve

LLAMA, A100 = ModelConfig.preset("llama-2-7b"), Hardware.preset("a100-80gb")
MODEL = lively(n_layers=1)


def some_load(seed: int, n: int = 40) -> list[TimedRequest]:
    """Prompts that often begin alike, so that a prefix cache finds something."""
    g = random.Random(seed)
    prompts = [[g.randrange(97) for _ in range(g.randint(1, 90))] for _ in range(8)]
    return [
        TimedRequest(at, g.choice(prompts) + [g.randrange(97)] * g.randint(0, 9), g.randint(1, 20))
        for at in poisson_arrivals(40.0, n, seed)
    ]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize(("places", "budget", "n_blocks"), [(8, 64, 400), (3, 16, 40), (8, 48, 12)])
def test_the_times_are_the_real_engines(caching, policy, places, budget, n_blocks):
    """Preemptions and a crowded pool included; only the tokens differ."""
    limits = {"max_seqs": places, "max_batch_tokens": budget, "n_blocks": n_blocks}
    limits["policy"] = policy
    config = EngineConfig(**limits, prefix_caching=caching)
    real = Engine(MODEL, config, clock=VirtualClock(LLAMA, A100))
    virtual = VirtualEngine(LLAMA, A100, **limits, prefix_caching=caching)
    load = some_load(places)
    a, b = serve(real, load), serve(virtual, load)
    assert [c.request_id for c in a] == [c.request_id for c in b]
    assert [c.token_times for c in a] == [c.token_times for c in b]
    assert [c.queued for c in a] == [c.queued for c in b]
    assert summarize(a) == summarize(b) and not virtual.busy
    ours, theirs = virtual.stats, real.stats
    assert list(ours.timeline) == list(theirs.timeline)
    assert (ours.prefix_hit_tokens > 0) == caching
    assert ours.prefix_hit_tokens == theirs.prefix_hit_tokens
    assert ours.preemptions == theirs.preemptions
    assert (n_blocks == 12) <= (ours.preemptions > 0)


def test_whole_prompts_and_a_look_at_each_plan():
    plans = []

    def look(plan):
        stored = sum(work.request.table.n_tokens for work in plan.work)
        plans.append((stored, [len(work.tokens) for work in plan.work]))

    engine = VirtualEngine(
        LLAMA, A100, max_seqs=2, max_batch_tokens=8, n_blocks=9, chunked_prefill=False, on_plan=look
    )
    for n_prompt in (5, 6):
        engine.submit([1] * n_prompt, 2)
    while engine.busy:
        engine.step()
    # The second prompt waits until it fits whole; a plan is seen before its tokens are stored.
    assert plans == [(0, [5]), (5, [1, 6]), (6, [1])]


def test_the_memory_that_the_weights_leave():
    engine = VirtualEngine(LLAMA, A100)
    block = 16 * costs.kv_bytes_per_token(LLAMA, "float16")
    used = engine.scheduler.manager.n_available * block + costs.weight_bytes(LLAMA, "float16")
    assert 0 <= A100.memory_bytes - used < block
    assert engine.step() == [] and engine.clock.now() == 0.0  # nothing to do takes no time


def test_what_it_refuses():
    engine = VirtualEngine(LLAMA, A100, n_blocks=2)
    for ids, n in (([], 3), ([1], 0)):
        with pytest.raises(ValueError, match="at least one prompt token, one new token"):
            engine.submit(ids, n)
    with pytest.raises(ValueError, match="need 3 blocks of 16"):
        engine.submit([1] * 32, 2)
    assert not engine.busy


def test_whom_the_door_turns_away():
    """It sees the engine as it is when the request falls due; the refused have no completion."""
    seen = []

    def admit(engine, request) -> bool:
        seen.append((request.max_new_tokens, len(engine.scheduler.running)))
        return request.max_new_tokens != 7

    load = [TimedRequest(0.0, [1, 2], 5), TimedRequest(0.0, [3], 7), TimedRequest(1.0, [4], 9)]
    done = serve(VirtualEngine(LLAMA, A100, n_blocks=9), load, admit=admit)
    assert [len(c.tokens) for c in done] == [5, 9]
    assert seen == [(5, 0), (7, 0), (9, 0)]
    assert serve(VirtualEngine(LLAMA, A100), load, admit=lambda engine, request: False) == []


def test_a_chat_sends_its_next_turn_after_the_answer():
    def after(request, completion):
        if len(request.prompt_ids) > 40:
            return None
        at = completion.arrival + completion.latency + 2.0
        return TimedRequest(at, [*request.prompt_ids, *completion.tokens, 5], 10)

    engine = VirtualEngine(LLAMA, A100, n_blocks=40, prefix_caching=True)
    done = serve(engine, [TimedRequest(0.5, [1] * 20, 10)], after=after)
    assert [c.n_prompt for c in done] == [20, 31, 42]
    for before, later in pairwise(done):
        assert later.arrival == pytest.approx(before.arrival + before.latency + 2.0)
    # Full blocks of the turn before: of 29 computed tokens one block, of 40 two.
    assert engine.stats.prefix_hit_tokens == 16 + 32


def test_bursts_have_the_variation_asked_for():
    for variation in (0.3, 1.0, 3.0):
        gaps = np.diff([0.0, *bursty_arrivals(5.0, 40_000, variation, seed=1)])
        assert gaps.min() >= 0 and gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert bursty_arrivals(2.0, 9, 3.0, 1) == bursty_arrivals(2.0, 9, 3.0, 1)
    assert bursty_arrivals(2.0, 9, 3.0, 1) != bursty_arrivals(2.0, 9, 3.0, 2)
    for rate, variation in ((0, 1), (math.inf, 1), (1, 0), (1, math.nan)):
        with pytest.raises(ValueError, match="give a finite number above 0"):
            bursty_arrivals(rate, 3, variation)
