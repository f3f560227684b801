"""An engine that is interrupted at any line of a step goes on afterwards, and no token is wrong.

Ctrl-C is an exception that may be raised between any two lines of Python. Here it is raised at each
of them in turn: a trace function counts the lines that run inside the package and raises at one.
"""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from token_model import CheckedEngine, answer

from minillm import Sampling
from minillm.serving.timeline import Clock

FILES = ("engine.py", "scheduler.py", "blocks.py", "request.py", "steps.py", "paged.py")


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt."""


def interrupted_at(line: int, call: Callable[[], Any]) -> tuple[Any, int]:
    """`call()` with an Interrupt raised at the given line; its result, and the lines that ran.

    Not inside `_restore`, which another test interrupts, and not once results are handed over: what
    a function has returned is the caller's.
    """
    seen, over = 0, False

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line" and not over:
            seen += 1
            if seen == line:
                raise Interrupt
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal over
        over = over or frame.f_code.co_name == "_hand_out"
        name = frame.f_code.co_filename.rpartition("/")[2]
        inside = name in FILES and "minillm" in frame.f_code.co_filename
        skipped = frame.f_code.co_name in ("_restore", "restart", "reset")
        return local if inside and not skipped else None

    sys.settrace(trace)
    try:
        return call(), seen
    except Interrupt:
        return None, seen
    finally:
        sys.settrace(None)


def make() -> tuple[CheckedEngine, dict[int, list[int]], dict[int, list[int]]]:
    """An engine with samples, shared prefixes, little memory; the right answers; what came."""
    engine = CheckedEngine(9, 2, max_seqs=3, max_batch_tokens=6)
    right: dict[int, list[int]] = {}
    came: dict[int, list[int]] = {}
    for prompt, n, seeds in (([0, 1, 0], 4, [0, 1]), ([0, 1, 0, 2], 3, [None]), ([1], 5, [2])):
        samplings = [None if seed is None else Sampling(1.0, seed=seed) for seed in seeds]
        for sampling in samplings:
            tokens: list[int] = []
            i = engine.submit(prompt, n, sampling=sampling, on_token=tokens.append)
            came[i], right[i] = tokens, answer(prompt, n, sampling)
    samplings = [Sampling(1.0, seed=seed) for seed in (5, 6)]
    for i, sampling in zip(engine.submit_samples([2, 0, 1], 3, samplings), samplings, strict=True):
        right[i] = answer([2, 0, 1], 3, sampling)
    return engine, right, came


def finished(engine: CheckedEngine) -> dict[int, list[int]]:
    answers = {i: c.tokens for i, c in engine.run().items()}
    engine.check()
    assert not engine.busy
    assert engine.manager.n_available == engine.manager.allocator.n_blocks
    return answers


def n_lines() -> int:
    engine, right, _ = make()
    answers, n = interrupted_at(-1, lambda: finished(engine))
    assert answers == right
    return n


def test_at_every_line():
    """A line in 23, on which all parts of a step are met many times over."""
    total = n_lines()
    assert total > 2000
    stride = 23
    for line in range(1, total + 1, stride):
        engine, right, came = make()
        interrupted_at(line, engine.run)
        assert finished(engine) == right, f"interrupted at line {line}"
        for i, tokens in came.items():
            # Each token is delivered at most once; the one at the interrupt may be lost.
            assert len(right[i]) - 1 <= len(tokens) <= len(right[i])


def test_again_and_again():
    """Several interrupts in one run, also while it starts again."""
    generator = random.Random(1)
    for _ in range(25):
        engine, right, _ = make()
        for _ in range(4):
            interrupted_at(generator.randrange(1, 400), engine.run)
        assert finished(engine) == right


def test_while_it_starts_again(monkeypatch):
    engine, right, _ = make()
    engine.step()
    engine.step()
    reset = engine.manager.reset

    def broken() -> None:
        reset()
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "reset", broken)
        patch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        with pytest.raises(Interrupt):
            engine.step()
    assert finished(engine) == right


class BrokenClock(Clock):
    """Fails at its n-th reading, once."""

    def __init__(self, n: int):
        self.n = n

    def now(self) -> float:
        self.n -= 1
        if self.n == 0:
            raise OSError("the clock broke")
        return super().now()


def test_a_clock_that_fails():
    for n in range(1, 40):
        engine, right, _ = make()
        engine.clock = BrokenClock(n)
        try:
            answers = finished(engine)
        except OSError:
            answers = finished(engine)
        assert answers == right


@pytest.mark.parametrize("arrival", ["now", float("nan"), float("inf"), [1]], ids=str)
def test_a_refused_arrival_harms_nobody(arrival):
    engine, right, _ = make()
    with pytest.raises(ValueError, match=r"arrival is .*; give a time in seconds on the engine"):
        engine.submit([0, 1], 3, arrival=arrival)
    assert finished(engine) == right
