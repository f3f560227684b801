"""The engine answers as `generate` does, alone or not; nothing leaks; times and counts add up."""

import gc
import math
import random
import tracemalloc
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from models import lively
from pool import check_pool

from minillm import Decoder, Engine, EngineConfig, Sampling, generate
from minillm.serving.request import Completion
from minillm.serving.scheduler import QueueFull
from minillm.serving.timeline import Clock
from minillm.speculation.drafters import NgramDrafter

MODEL = lively()
PROMPT = [5, 90, 3, 3, 41, 8, 13]


@cache
def answer(prompt: tuple[int, ...], n: int, sampling: Sampling | None = None) -> list[int]:
    return generate(MODEL, prompt, n, sampling=sampling)


def engine(model: Decoder = MODEL, *, clock: Clock | None = None, **options: object) -> Engine:
    return Engine(
        model, EngineConfig(**({"n_blocks": 100, "block_size": 4} | options)), clock=clock
    )


def assert_nothing_left(e: Engine) -> None:
    """All blocks can be had, nobody is remembered but the prefix cache."""
    manager = e.cache.manager
    check_pool(manager, [])
    assert manager.n_available == manager.allocator.n_blocks
    assert not e.busy and not e.scheduler.waiting and not e.scheduler.running
    assert not e._requests and not e._ended
    if not manager.prefix_caching:
        assert manager.allocator.n_free == manager.allocator.n_blocks


# The same tokens


OPTIONS: dict[str, dict[str, object]] = {
    "defaults": {},
    "static": {"policy": "static", "max_seqs": 3},
    "small steps": {"max_batch_tokens": 5, "max_seqs": 4},
    "one at a time": {"max_seqs": 1},
    "a token a step": {"max_seqs": 1, "max_batch_tokens": 1},
    "tiny pool": {"n_blocks": 16},
    "tiny pool, small steps": {"n_blocks": 16, "max_batch_tokens": 7, "max_seqs": 7},
    "tiny pool, static": {"n_blocks": 16, "policy": "static"},
    "whole prompts": {"chunked_prefill": False, "max_batch_tokens": 70},
    "whole prompts, tiny pool": {"chunked_prefill": False, "max_batch_tokens": 64, "n_blocks": 16},
    "no prefix caching": {"prefix_caching": False},
    "no prefix caching, tiny pool": {"prefix_caching": False, "n_blocks": 16},
    "blocks of one": {"block_size": 1, "n_blocks": 70},
    "blocks of 16": {"block_size": 16, "n_blocks": 6},
    "reference": {"backend": "reference"},
}


@cache
def some_requests() -> tuple[list[tuple[list[int], int, Sampling | None]], list[list[int]]]:
    """Requests, and what `generate` answers."""
    g = random.Random(1)
    shared = [g.randrange(97) for _ in range(18)]
    requests = []
    for i in range(12):
        prompt = shared[: g.choice([0, 8, 18])] + [g.randrange(97) for _ in range(g.randint(1, 20))]
        sampling = (
            Sampling(0.8, top_p=0.9, seed=i)
            if i % 3 == 0
            else Sampling(0, seed=i)
            if i % 3 == 1
            else None
        )
        requests.append((prompt, g.randint(1, 25), sampling))
    return requests, [answer(tuple(prompt), n, sampling) for prompt, n, sampling in requests]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_request_is_answered_as_if_alone(options):
    """With and without a common beginning, short and long, greedy and sampled, one by one."""
    requests, expected = some_requests()
    e, completions, arrivals = engine(**options), {}, {}
    for step in range(10_000):
        if step % 2 == 0 and step // 2 < len(requests):
            prompt, n, sampling = requests[step // 2]
            arrivals[e.submit(prompt, n, sampling=sampling)] = step // 2
        elif not e.busy:
            break
        completions |= {c.request_id: c for c in e.step()}
        if e.config.policy == "continuous":
            check_pool(e.cache.manager, [r.table for r in e.scheduler.running])
    assert len(completions) == len(requests)
    for request_id, i in arrivals.items():
        c = completions[request_id]
        assert (
            c.tokens == expected[i]
            and c.finish_reason == "length"
            and c.n_prompt == len(requests[i][0])
        )
    assert_nothing_left(e)
    if "n_blocks" in options and options["n_blocks"] == 16 and options.get("policy") != "static":
        assert e.stats.preemptions > 0
    assert (e.stats.prefix_hit_tokens > 0) == options.get("prefix_caching", True)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_new_tokens(n):
    e = engine()
    ids = [e.submit(PROMPT, n, sampling=Sampling(0.5, seed=1) if i else None) for i in range(2)]
    out = e.run()
    for i in ids:
        assert out[i].tokens == generate(
            MODEL, PROMPT, n, sampling=Sampling(0.5, seed=1) if i else None
        )
        assert out[i].finish_reason == "length"
        assert (
            math.isnan(out[i].ttft) == (n == 0)
            and math.isnan(out[i].tpot) == (n < 2)
            and out[i].latency >= 0
        )
    assert e.stats.steps == n
    assert_nothing_left(e)


def test_stop_ids():
    free = generate(MODEL, PROMPT, 30)
    e = engine()
    for stop in ([free[0]], [free[9], free[4]], iter([free[29]]), {free[5]}):
        stop = list(stop)
        first = next(i for i, token in enumerate(free) if token in stop)
        request = e.submit(PROMPT, 30, stop_ids=iter(stop))
        c = e.run()[request]
        assert c.tokens == free[: first + 1] and c.finish_reason == "stop"
    request = e.submit(PROMPT, 30, stop_ids=set(range(97)) - set(free))
    assert e.run()[request].finish_reason == "length"
    assert_nothing_left(e)


def test_a_stop_token_as_the_very_last_is_a_stop():
    free = generate(MODEL, PROMPT, 10)
    n = next(i for i in range(9, 0, -1) if free[i] not in free[:i])
    e = engine()
    request = e.submit(PROMPT, n + 1, stop_ids=[free[n]])
    assert e.run()[request].finish_reason == "stop"


def test_sampling_does_not_depend_on_neighbours():
    alone = {
        seed: generate(MODEL, PROMPT, 15, sampling=Sampling(1.0, seed=seed)) for seed in range(6)
    }
    e = engine(max_seqs=4)
    ids = {
        seed: e.submit(PROMPT, 15, sampling=Sampling(1.0, seed=seed)) for seed in (3, 0, 5, 1, 4, 2)
    }
    out = e.run()
    assert {seed: out[i].tokens for seed, i in ids.items()} == alone
    twins = [e.submit(PROMPT, 15, sampling=Sampling(1.0)) for _ in range(2)]
    out = e.run()
    assert out[twins[0]].tokens != out[twins[1]].tokens, "without a seed each draws its own"


# Samples of one prompt


@pytest.mark.parametrize(
    "options",
    [
        {}, {"max_seqs": 3}, {"max_seqs": 1}, {"policy": "static", "max_seqs": 3}, {"n_blocks": 9},
        {"max_batch_tokens": 8, "max_seqs": 8},
        {"chunked_prefill": False}, {"prefix_caching": False},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("n_prompt", [1, 8, 19])
def test_samples_equal_separate_requests(n_prompt, options):
    prompt, samplings = (
        (PROMPT * 3)[:n_prompt],
        [Sampling(0.9, seed=seed) for seed in range(5)] + [None, Sampling(0.9, seed=0)],
    )
    expected = [answer(tuple(prompt), 12, sampling) for sampling in samplings]
    e = engine(**options)
    before = e.submit([1, 2, 3], 9)
    ids = e.submit_samples(prompt, 12, samplings)
    out = e.run()
    assert ids == [1, 2, 3, 4, 5, 6, 7] and [out[i].tokens for i in ids] == expected
    assert out[before].tokens == generate(MODEL, [1, 2, 3], 9)
    assert_nothing_left(e)


def test_samples_compute_their_prompt_once_and_share_its_blocks():
    e = engine(max_seqs=8, prefix_caching=False)
    e.submit_samples(
        PROMPT * 3, 12, [Sampling(0.9, seed=seed) for seed in range(8)]
    )  # 21 tokens: 5 blocks, and 1 of a sixth
    e.step()
    assert (
        e.stats.timeline[-1].prefilled == 21
        and e.cache.manager.n_available == 94
        and len(e.scheduler.running) == 8
    )
    e.step()  # each writes: seven copies of the sixth block
    assert e.stats.peak_blocks == 5 + 8 and e.stats.timeline[-1].decoded == 8
    e.run()
    assert sum(step.prefilled for step in e.stats.timeline) == 21


def test_samples_from_iterators():
    """What can be read only once is read only once."""
    free = generate(MODEL, PROMPT, 20)
    e = engine()
    ids = e.submit_samples(iter(PROMPT), 20, [None, None, Sampling(0)], stop_ids=iter([free[6]]))
    out = e.run()
    assert all(out[i].tokens == free[: free.index(free[6]) + 1] for i in ids)


def test_a_sample_that_stops_at_once_leaves_the_others():
    samplings = [Sampling(1.5, seed=seed) for seed in range(4)]
    answers = [generate(MODEL, PROMPT, 9, sampling=sampling) for sampling in samplings]
    e = engine()
    ids = e.submit_samples(
        PROMPT, 9, samplings, stop_ids=[answers[0][0]]
    )  # the first, whose blocks the others share
    out = e.run()
    assert out[ids[0]].tokens == answers[0][:1]
    for i, sampling in zip(ids, samplings, strict=True):
        assert out[i].tokens == generate(
            MODEL, PROMPT, 9, sampling=sampling, stop_ids=[answers[0][0]]
        )
    assert_nothing_left(e)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_samples_outlive_the_first(steps):
    """Aborted before, while and after it computes the prompt for the others."""
    e = engine(max_batch_tokens=8, max_seqs=8)
    ids = e.submit_samples(PROMPT * 3, 9, [Sampling(0.9, seed=seed) for seed in range(3)])
    for _ in range(steps):
        e.step()
    e.abort(ids[0])
    out = e.run()
    assert out[ids[0]].finish_reason == "aborted"
    for i in (1, 2):
        assert out[ids[i]].tokens == generate(MODEL, PROMPT * 3, 9, sampling=Sampling(0.9, seed=i))
    assert_nothing_left(e)


# Aborts and failures


def test_abort():
    e = engine(max_seqs=2)
    a, b, c, d = (e.submit(PROMPT, 9) for _ in range(4))
    for _ in range(3):
        e.step()
    e.abort(b)  # running, with three tokens
    e.abort(d)  # waiting
    with pytest.raises(
        ValueError, match=f"Request {b} is not running or waiting; it ended, or never was"
    ):
        e.abort(b)
    completions = {c.request_id: c for c in e.step()}
    assert completions.keys() == {b, d}
    free = generate(MODEL, PROMPT, 9)
    assert (completions[b].tokens, completions[b].finish_reason) == (free[:3], "aborted")
    assert (completions[d].tokens, completions[d].finish_reason) == ([], "aborted")
    assert math.isnan(completions[d].ttft) and completions[b].error is None
    out = e.run()
    assert out.keys() == {a, c} and out[a].tokens == out[c].tokens == free
    for request in (a, d, 4, -1, None):
        with pytest.raises(ValueError, match="is not running or waiting"):
            e.abort(request)
    assert_nothing_left(e)


def test_abort_of_one_that_has_just_ended():
    e = engine(policy="static")  # ended, but not handed out before its batch is over
    a, b = e.submit(PROMPT, 1), e.submit(PROMPT, 5)
    assert e.step() == []
    with pytest.raises(ValueError, match=f"Request {a} is not running or waiting"):
        e.abort(a)
    assert e.run().keys() == {a, b}


def test_aborting_everything_leaves_nothing():
    e = engine(n_blocks=16, max_batch_tokens=7, max_seqs=7)
    ids = [e.submit(PROMPT * 2, 9, sampling=Sampling(1.0)) for _ in range(9)]
    for _ in range(4):
        e.step()
    for i in ids:
        e.abort(i)
    assert e.busy and {c.request_id for c in e.step()} == set(ids)
    assert_nothing_left(e)


def nan_after(n: int, prompt: list[int]) -> Decoder:
    """A model whose logits are NaN for a row that continues `prompt` by `n` tokens."""
    model = lively()
    hidden = model.hidden

    def broken(tokens, batch):
        out = hidden(tokens, batch).clone()
        ends = torch.tensor([t.n_tokens for t in batch.tables])  # the new tokens are counted on
        rows = torch.tensor(batch.n_new).cumsum(0) - 1
        out[0, rows[ends == len(prompt) + n]] = torch.nan
        return out

    model.hidden = broken
    return model


@pytest.mark.parametrize("n", [0, 3])
def test_logits_that_are_not_numbers_end_their_request_only(n, caplog):
    prompt = [*PROMPT, 1]
    e = engine(nan_after(n, prompt), prefix_caching=False)
    # The others never get as long as the spoiled sequence.
    asked = [(PROMPT[:2], 4), (prompt, 9), (PROMPT[:3], 4)]
    ids = [e.submit(p, m, sampling=Sampling(0.9, seed=i)) for i, (p, m) in enumerate(asked)]
    out = e.run()
    bad = out[ids[1]]
    assert bad.finish_reason == "aborted" and "logits are not numbers (NaN)" in bad.error
    assert bad.tokens == generate(MODEL, prompt, n, sampling=Sampling(0.9, seed=1))
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "Traceback" in caplog.text, "seen, with its traceback"
    for i in (0, 2):
        answer = generate(MODEL, asked[i][0], 4, sampling=Sampling(0.9, seed=i))
        assert out[ids[i]].tokens == answer
    assert_nothing_left(e)


def test_a_failure_of_the_first_sample_leaves_the_others(caplog):
    def broken(token):
        raise RuntimeError("no")

    e = engine()
    first = e.submit(PROMPT, 9, on_token=broken)
    others = e.submit_samples(PROMPT, 9, [Sampling(0.9, seed=seed) for seed in range(3)])
    out = e.run()
    assert out[first].finish_reason == "aborted" and out[first].error == "RuntimeError: no"
    assert len(out[first].tokens) == 1 and "RuntimeError: no" in caplog.text
    assert [out[i].finish_reason for i in others] == ["length"] * 3
    assert_nothing_left(e)


@pytest.mark.parametrize("where", ["hidden", "head"])
def test_a_failure_in_the_forward_pass_ends_those_who_took_part(monkeypatch, where):
    """It is raised, too, and the next step works."""
    model = lively()
    e = engine(model, max_seqs=2)
    a, b, c = (e.submit([*PROMPT, i], 9) for i in range(3))
    e.step()

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        if where == "hidden":
            patch.setattr(model, where, broken)
        else:
            patch.setitem(model._modules, "head", broken)
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            e.run()
    assert any(entry.name == "broken" for entry in caught.traceback)
    assert e.cache.manager.n_available == e.cache.manager.allocator.n_blocks
    out = e.run()
    assert out.keys() == {a, b, c} and out[c].tokens == generate(MODEL, [*PROMPT, 2], 9)
    for i in (a, b):
        assert out[i].finish_reason == "aborted" and out[i].error == "RuntimeError: out of memory"
        assert out[i].tokens == generate(MODEL, [*PROMPT, i], 1)
    again = e.submit([*PROMPT, 0], 9)
    assert e.run()[again].tokens == generate(MODEL, [*PROMPT, 0], 9)
    assert_nothing_left(e)


# Tokens as they come


def test_tokens_are_delivered_as_they_come():
    clock, came = FakeClock(), []
    e = engine(clock=clock)
    request = e.submit(PROMPT, 4, on_token=lambda token: came.append((clock.time, token)))
    out = e.run()[request]
    assert [token for _, token in came] == out.tokens == generate(MODEL, PROMPT, 4)
    assert [moment - 100 for moment, _ in came] == out.token_times == [7, 17, 27, 37]
    assert out.inter_token == [10, 10, 10]


def test_a_static_batch_delivers_at_its_end():
    clock, came = FakeClock(), []
    e = engine(clock=clock, policy="static")
    short = e.submit(PROMPT, 2, on_token=lambda token: came.append((clock.time, token)))
    e.submit(PROMPT[:3], 5)
    out = e.run()
    end = clock.time
    assert came == [(end, token) for token in generate(MODEL, PROMPT, 2)]
    assert out[short].token_times == [end - 100] * 2 and out[short].tpot == 0
    assert out[short].ttft == out[short].latency == end - 100


def test_samples_share_a_callback():
    came = []
    e = engine()
    ids = e.submit_samples(PROMPT, 5, [None, Sampling(1.0, seed=1)], on_token=came.append)
    out = e.run()
    assert sorted(came) == sorted(out[ids[0]].tokens + out[ids[1]].tokens)


def test_samples_with_a_callback_each():
    first, second = [], []
    e = engine()
    samplings = [None, Sampling(1.0, seed=1)]
    ids = e.submit_samples(PROMPT, 5, samplings, on_token=[first.append, second.append])
    out = e.run()
    assert [first, second] == [out[i].tokens for i in ids]
    with pytest.raises(ValueError, match="on_token has 3 functions for 2 samplings; give one for"):
        e.submit_samples(PROMPT, 5, samplings, on_token=[None] * 3)
    with pytest.raises(TypeError, match="give a function of one token id"):
        e.submit_samples(PROMPT, 5, samplings, on_token=[None, 3])


@pytest.mark.parametrize("config", [{}, {"policy": "static"}, {"drafter": NgramDrafter(), "k": 5}])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_callback_that_has_enough_ends_the_answer(config, place):
    """With the token that it was called with, whatever was guessed right after it."""
    prompt = PROMPT * 3  # repeats itself, so that drafts are right
    whole = generate(MODEL, prompt, 30)
    came, e = [], engine(**config)

    def enough(token: int) -> bool:
        came.append(token)
        return len(came) == place + 1

    request, other = e.submit(prompt, 30, on_token=enough), e.submit(prompt, 30)
    out = e.run()
    assert out[request].tokens == came == whole[: place + 1]
    assert out[request].finish_reason == "stop" and out[other].tokens == whole
    assert len(out[request].token_times) == place + 1
    assert_nothing_left(e)


def test_only_true_ends_an_answer():
    """A callback may return what it likes, such as the number of characters written."""
    e = engine()
    request = e.submit(PROMPT, 5, on_token=lambda token: 1)
    assert e.run()[request].finish_reason == "length"


def test_abort_in_the_middle_of_a_step_is_refused():
    e = engine()
    request = e.submit(PROMPT, 9, on_token=lambda token: e.abort(request))
    other = e.submit(PROMPT, 4)
    out = e.run()
    assert out[request].finish_reason == "aborted" and out[other].finish_reason == "length"
    assert "return True there to end the answer, or abort between two steps" in out[request].error
    assert_nothing_left(e)


def test_the_queue_has_a_limit():
    """Beside the places: an engine with nothing to do takes as many requests as it can run."""
    e = engine(max_seqs=2, max_waiting=2)
    ids = [e.submit(PROMPT, 5) for _ in range(4)]
    with pytest.raises(QueueFull, match=r"4 requests are here, and 2 may run \(max_seqs\) and 2"):
        e.submit(PROMPT, 2)
    e.step()
    with pytest.raises(QueueFull, match="so 1 more cannot be taken"):
        e.submit(PROMPT, 2)
    assert e.run().keys() == set(ids)
    with pytest.raises(QueueFull, match="so 5 more cannot be taken"):
        e.submit_samples(PROMPT, 2, [None] * 5)
    assert_nothing_left(e)


# Times


class FakeClock(Clock):
    """A second for each prefilled token, ten for each decoding request, and what a test adds."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def passed(self, prefilled: int, decoded: int, context: int) -> None:
        self.time += prefilled + 10 * decoded


def times(c: Completion) -> tuple[float, float, float, float]:
    return c.arrival, c.ttft, c.tpot, c.latency


def test_the_time_in_the_queue():
    """Until a request is first let in; a sample is let in with the prompt that it shares."""
    e = engine(clock=FakeClock(), max_seqs=1)
    first, second, never = (e.submit(PROMPT, 3) for _ in range(3))
    e.abort(never)
    out = e.run()
    assert out[first].queued == 0 and out[second].queued == out[first].duration > 0
    assert math.isnan(out[never].queued)
    e = engine(clock=FakeClock(), max_seqs=2)
    samples = e.submit_samples(PROMPT, 3, [None, None])
    out = e.run()
    assert [out[i].queued for i in samples] == [0, 0]


def test_times():
    clock = FakeClock()
    e = engine(clock=clock)
    a = e.submit(PROMPT, 3)
    clock.time += 5
    b = e.submit(PROMPT[:4], 1)
    assert e.step()[0].request_id == b  # both prompts: 11 seconds
    clock.time += 2
    c = e.submit([1], 2, arrival=110.0)
    e.step()  # a decodes, c's prompt: 11 seconds; then both decode
    out = {done.request_id: done for done in e.step()}
    assert clock.time == 149
    assert times(out[a]) == (100, 16, (13 + 20) / 2, 49)
    assert times(out[c]) == (110, 19, 20, 39)
    assert out[a].latency == out[a].ttft + out[a].tpot * 2


def test_waiting_counts():
    e = engine(clock=FakeClock(), max_seqs=1)
    a, b = e.submit(PROMPT, 3), e.submit(PROMPT, 3)
    out = e.run()
    assert times(out[a]) == (100, 7, 10, 27)
    assert times(out[b]) == (100, 27 + 3, 10, 50), "4 of its 7 tokens were known"


def test_an_abort_ends_the_latency():
    clock = FakeClock()
    e = engine(clock=clock, max_seqs=1)
    a, b = e.submit(PROMPT, 9), e.submit(PROMPT, 9)
    e.step()
    e.step()
    clock.time += 50
    e.abort(a)
    e.abort(b)
    out = {c.request_id: c for c in e.step()}
    assert out[a].latency == 17 and (out[a].ttft, out[a].tpot) == (7, 10), "to its last token"
    assert out[b].latency == 67 and math.isnan(out[b].ttft) and math.isnan(out[b].tpot)


def test_static_batches_are_delivered_together():
    clock = FakeClock()
    e = engine(clock=clock, policy="static", max_seqs=2)
    ids = [e.submit([*PROMPT, i], n) for i, n in enumerate((1, 4, 2, 3))]
    delivered = []
    while e.busy:
        if completions := e.step():
            delivered.append((clock.time, sorted(c.request_id for c in completions)))
            for c in completions:
                assert c.arrival + c.latency == clock.time
                assert c.tokens == generate(MODEL, [*PROMPT, c.request_id], len(c.tokens))
    assert [who for _, who in delivered] == [ids[:2], ids[2:]]
    assert [moment for moment, _ in delivered] == [100 + 16 + 3 * 10, 146 + 8 + 20 + 10], (
        "the second batch finds 4 known tokens each"
    )


def test_run_delivers_each_static_batch_when_it_is_over():
    clock, came = FakeClock(), []
    e = engine(clock=clock, policy="static", max_seqs=2)
    for i, n in enumerate((1, 4, 2, 3)):
        e.submit([*PROMPT, i], n, on_token=lambda _: came.append(clock.time))
    out = e.run()
    ends = [out[i].arrival + out[i].latency for i in range(4)]
    assert ends == [146, 146, 184, 184] and came == [146] * 5 + [184] * 5
    assert all(c.ttft == c.latency == c.duration for c in out.values())


def test_continuous_batches_are_not():
    e = engine(clock=FakeClock(), max_seqs=2)
    ids = [e.submit([*PROMPT, i], n) for i, n in enumerate((1, 4, 2, 3))]
    order = []
    while e.busy:
        order += [c.request_id for c in e.step()]
    assert order == [ids[0], ids[2], ids[1], ids[3]]


# Counts


@pytest.mark.parametrize(
    "options",
    [{}, {"n_blocks": 16, "max_batch_tokens": 16, "max_seqs": 8}, {"policy": "static"}],
    ids=str,
)
def test_counts_against_another_way_of_counting(options, monkeypatch):
    e = engine(**options)
    slots = empty = peak = 0
    forward = e._forward

    def counted(plan):
        nonlocal slots, empty, peak
        logits = forward(plan)
        holds: dict[int, set[int]] = {}  # of each block in use, the slots that hold a token
        for request in e.scheduler.running:
            for i, block in enumerate(request.table.blocks):
                holds.setdefault(block, set()).update(
                    range(min(4, max(0, request.table.n_tokens - 4 * i)))
                )
        slots += 4 * len(holds)
        empty += sum(4 - len(full) for full in holds.values())
        peak = max(peak, len(holds))
        return logits

    monkeypatch.setattr(e, "_forward", counted)
    g = random.Random(0)
    for i in range(10):
        prompt = [g.randrange(97) for _ in range(g.randint(1, 20))]
        if i % 4 == 0:
            e.submit_samples(
                prompt, g.randint(1, 15), [Sampling(0.9, seed=0), None, Sampling(0.9, seed=1)]
            )
        else:
            e.submit(prompt, g.randint(1, 15))
    out = e.run()
    assert (e.stats.peak_blocks, e.stats.slots, e.stats.empty_slots) == (peak, slots, empty)
    assert e.stats.kv_waste == empty / slots and 0 < e.stats.kv_waste < 1
    assert e.stats.steps == len(e.stats.timeline)
    assert (e.stats.preemptions > 0) == ("n_blocks" in options)
    for step in e.stats.timeline:
        assert (
            step.prefilled + step.decoded
            == sum(n for _, n, _ in step.work)
            <= e.config.max_batch_tokens
        )
        assert step.decoded == sum(decoding for _, _, decoding in step.work)
        assert step.start <= step.end and 0 <= step.free_blocks <= e.config.n_blocks
    if not e.stats.preemptions:
        assert sum(step.decoded for step in e.stats.timeline) == sum(
            len(c.tokens) - 1 for c in out.values()
        )


def test_the_timeline_of_one_request():
    e = engine(max_batch_tokens=3, max_seqs=3)
    request = e.submit(PROMPT, 3)
    e.run()
    rows = [
        (s.prefilled, s.decoded, s.running, s.waiting, s.context, s.free_blocks, s.work)
        for s in e.stats.timeline
    ]
    assert rows == [
        (3, 0, 1, 0, 3, 99, ((request, 3, False),)),
        (3, 0, 1, 0, 6, 98, ((request, 3, False),)),
        (1, 0, 1, 0, 7, 98, ((request, 1, False),)),
        (0, 1, 1, 0, 8, 98, ((request, 1, True),)),
        (0, 1, 1, 0, 9, 97, ((request, 1, True),)),
    ]
    assert (
        e.stats.kv_waste == (1 + 2 + 1 + 0 + 3) / (4 + 8 + 8 + 8 + 12) and e.stats.peak_blocks == 3
    )


def test_prefix_hits_are_counted():
    e = engine()
    for hits in (0, 4, 8):  # of 7 tokens one block of four; nothing is hit twice
        e.submit(PROMPT, 1)
        e.run()
        assert e.stats.prefix_hit_tokens == hits


def test_no_waste_before_anything_ran():
    assert engine().stats.kv_waste == 0.0 and engine().run() == {} and engine().step() == []


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_blocks": 0}, "n_blocks is 0; it must be a whole number, 1 or more"),
        ({"n_blocks": 2.0}, r"n_blocks is 2\.0"),
        ({"block_size": 0}, "block_size is 0; it must be a whole number"),
        ({"max_seqs": 0}, "max_seqs is 0; it must be a whole number"),
        ({"max_batch_tokens": True}, "max_batch_tokens is True; it must be a whole number"),
        ({"max_seqs": 9, "max_batch_tokens": 8}, "max_batch_tokens is 8 with max_seqs 9; each run"),
        ({"policy": "greedy"}, "policy is 'greedy'; choose continuous or static"),
        ({"backend": "tiled"}, "backend is 'tiled'; choose one of auto, reference, triton, sdpa"),
        ({"cuda_graphs": True}, "cuda_graphs needs a model on a CUDA device; this one is on"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        engine(**options)


@pytest.mark.parametrize("chunked", [True, False])
def test_refused_requests(chunked):
    e = engine(n_blocks=5, max_batch_tokens=18, max_seqs=4, chunked_prefill=chunked)
    for arguments, error, message in (
        (("Hello", 5), TypeError, "prompt_ids is a string"),
        (([], 5), ValueError, "prompt_ids is empty"),
        (([97], 5), ValueError, "prompt_ids holds 97"),
        (([1], -1), ValueError, "max_new_tokens is -1"),
        (
            ([1] * 10, 12),
            ValueError,
            "10 prompt tokens and 12 new ones need 6 blocks of 4, and there are 5; ask for fewer",
        ),
        (([1] * 200, 57), ValueError, "exceed the 256 positions"),
    ):
        with pytest.raises(error, match=message):
            e.submit(*arguments)
        with pytest.raises(error, match=message):
            e.submit_samples(*arguments, [None, None])
    with pytest.raises(TypeError, match=r"sampling is 0\.7; give a minillm\.Sampling"):
        e.submit([1], 5, sampling=0.7)
    with pytest.raises(TypeError, match=r"sampling is 0\.7"):
        e.submit_samples([1], 5, [None, 0.7])
    with pytest.raises(ValueError, match="samplings is empty; give one Sampling"):
        e.submit_samples([1], 5, [])
    if not chunked:
        with pytest.raises(
            ValueError,
            match="10 prompt tokens and 10 new ones may have to be computed in one step of at",
        ):
            e.submit([1] * 10, 10)
    assert_nothing_left(e)
    first = e.submit([1] * 10, 11 if chunked else 9)  # the last token is never computed
    assert first == 0, "refused requests use up no numbers"
    assert len(e.run()[0].tokens) == (11 if chunked else 9)


# Many


@dataclass
class Tally:
    tokens: int = 0
    aborted: int = 0


def soak(e: Engine, n: int, seed: int) -> Tally:
    g, tally, ids, sent, alive = random.Random(seed), Tally(), set(), 0, set()
    while sent < n or e.busy:
        while sent < n and len(alive) < 40:
            prompt = [7] * g.choice([0, 0, 4, 8]) + [
                g.randrange(97) for _ in range(g.randint(1, 10))
            ]
            samplings = [
                g.choice([None, Sampling(1.0), Sampling(0.7, seed=sent)])
                for _ in range(g.choice([1, 1, 1, 1, 3]))
            ]
            alive |= set(
                e.submit_samples(
                    prompt, g.choice([0, 1, 2, 4, 8]), samplings, stop_ids=[g.randrange(97)]
                )
            )
            sent += len(samplings)
        if alive and g.random() < 0.3:
            victim = g.choice(sorted(alive))
            try:
                e.abort(victim)
            except ValueError:
                # It asked for no tokens, and is not handed out yet.
                assert e._requests[victim].finish_reason == "length"
        for c in e.step():
            assert c.request_id not in ids
            ids.add(c.request_id)
            alive.remove(c.request_id)
            tally.tokens += len(c.tokens)
            tally.aborted += c.finish_reason == "aborted"
    assert len(ids) == sent and not alive
    return tally


def test_forgetting_prefixes():
    """Then a prompt costs as much as the first time; not while requests are running."""
    e = engine(MODEL, n_blocks=20)
    hits = []
    for forget in (False, False, True):
        if forget:
            e.forget_prefixes()
        before = e.stats.prefix_hit_tokens
        e.submit([*range(1, 40)], 2)
        with pytest.raises(ValueError, match="running or waiting; run them to their end first"):
            e.forget_prefixes()
        e.run()
        hits.append(e.stats.prefix_hit_tokens - before)
    assert hits[0] == hits[2] == 0 < hits[1]


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind():
    e = engine(lively(n_layers=1), n_blocks=30, block_size=4, max_seqs=16, max_batch_tokens=64)
    soak(e, 200, 0)  # everything that is set up once is
    e.stats.timeline.clear()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tally = soak(e, 1800, 1)
        e.stats.timeline.clear()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert (
        tally.tokens > 3000
        and tally.aborted > 20
        and e.stats.preemptions > 20
        and e.stats.prefix_hit_tokens > 1000
    )
    assert_nothing_left(e)
    assert grown < 150_000, f"{grown} bytes more than before 1800 requests"


def test_the_timeline_is_bounded():
    timeline = engine().stats.timeline
    assert timeline.maxlen is not None and timeline.maxlen <= 1_000_000


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"
)
def test_cuda_graphs_change_nothing():
    model = lively().cuda()
    for samplings in ([None], [Sampling(0.8, seed=seed) for seed in range(5)]):
        answers = []
        for graphs in (False, True):
            e = engine(model, n_blocks=30, max_seqs=6, cuda_graphs=graphs)
            ids = [
                i for n in (3, 8, 20) for i in e.submit_samples(PROMPT[: n % 7 + 1], n, samplings)
            ]
            out = e.run()
            answers.append([out[i].tokens for i in ids])
        assert answers[0] == answers[1]
    with pytest.raises(ValueError, match="cuda_graphs needs the backend 'triton'"):
        engine(model, cuda_graphs=True, backend="sdpa")
