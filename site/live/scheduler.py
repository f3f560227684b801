"""A scheduler, step by step: `minillm.serving.scheduler` plans, a virtual engine counts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from live.controls import Choice, Slider, Text
from live.svg import box, picture, seconds, text
from minillm.config import ModelConfig
from minillm.hardware import Hardware
from minillm.serving.request import Request
from minillm.serving.step_plan import StepPlan
from minillm.serving.virtual_time import VirtualEngine

COLOURS = ("blue", "orange", "green", "sky", "purple", "red", "olive", "violet")
MOST_REQUESTS, MOST_STEPS = 16, 120
EXAMPLES = {
    "eight requests": "2+2 2+7 2+3 2+4 2+5 2+1 2+6 2+2",
    "long answers, few blocks": "8+30 12+28 6+34 10+24 9+20",
    "one long prompt": "3+12 3+12 3+12 60+4 3+8",
}

CONTROLS = (
    Text("requests", "requests: prompt + answer", EXAMPLES["eight requests"], EXAMPLES),
    Choice("policy", "policy", {"continuous": "continuous", "static": "static"}, "continuous"),
    Choice("chunks", "prompts", {"yes": "in chunks", "no": "whole"}, "yes"),
    Slider("places", "places", [1, 2, 3, 4, 5, 6, 7, 8], 4),
    Slider("budget", "tokens a step", [8, 12, 16, 24, 32, 64, 128], 16),
    Slider("blocks", "blocks", [8, 12, 16, 20, 24, 32, 48], 24),
    Slider("block_size", "tokens in a block", [1, 2, 4, 8, 16], 4),
)


Tables = dict[int, tuple[tuple[int, ...], int]]
"""Request -> (its blocks, tokens stored in them)."""
Look = tuple[list[Request], Tables]


@dataclass(frozen=True)
class Frame:
    """One step as it was planned, and the clock and the counts after it."""

    work: dict[int, tuple[int, bool]]  # request -> (tokens computed, whether it decoded)
    seats: dict[int, int]  # request -> its place
    begins: frozenset[int]
    ends: frozenset[int]
    sent_back: tuple[int, ...]
    waiting: tuple[int, ...]
    tables: Tables
    now: float  # seconds


def parsed(requests: str) -> list[tuple[int, int]]:
    """Pairs of prompt and answer from a text such as "2+7 3+1"; ValueError for any other."""
    found = re.split(r"[\s,;]+", requests.strip())
    pairs = [re.fullmatch(r"(\d{1,3})\+(\d{1,3})", part) for part in found]
    if not all(pairs) or not 1 <= len(pairs) <= MOST_REQUESTS:
        raise ValueError(
            f"Give 1 to {MOST_REQUESTS} requests as prompt + answer in tokens, such as 2+7 3+12."
        )
    return [(int(pair[1]), int(pair[2])) for pair in pairs]


def frames(
    pairs: Sequence[tuple[int, int]], policy: str, chunks: bool, places: int, budget: int,
    blocks: int, block_size: int,
) -> list[Frame]:  # fmt: skip
    """Every step of a virtual Llama-3-8B on an H100; ValueError for what could never run."""
    seen: list[Look] = []
    engine = VirtualEngine(
        ModelConfig.preset("llama-3-8b"), Hardware.preset("h100"), max_seqs=places,
        max_batch_tokens=budget, n_blocks=blocks, block_size=block_size, policy=policy,
        chunked_prefill=chunks,
        on_plan=lambda plan: seen.append(_look(plan, engine.scheduler.running)),
    )  # fmt: skip
    for n_prompt, n_answer in pairs:
        engine.submit([0] * n_prompt, n_answer)
    scheduler, seats, made = engine.scheduler, {}, []
    while engine.busy:
        if len(made) == MOST_STEPS:
            raise ValueError(f"That takes more than {MOST_STEPS} steps; ask for fewer tokens.")
        before, running = dict(seats), list(scheduler.running)
        engine.step()
        here, tables = seen[-1]
        ids = {request.id for request in here}
        sent_back = tuple(r.id for r in reversed(running) if r.id not in ids)
        for request in (*sent_back, *(i for i in seats if i not in ids)):
            seats.pop(request, None)
        for request in here:
            free = min(set(range(places)) - set(seats.values()), default=0)
            seats.setdefault(request.id, free)
        step = engine.stats.timeline[-1]
        left = frozenset(ids - {request.id for request in scheduler.running})
        made.append(
            Frame(
                work={i: (n, decoded) for i, n, decoded in step.work},
                seats=dict(seats),
                begins=frozenset(ids - before.keys()),
                ends=left,
                sent_back=sent_back,
                waiting=tuple(request.id for request in scheduler.waiting),
                tables=tables,
                now=engine.clock.now(),
            )
        )
        for request in left:
            seats.pop(request, None)
    return made


def _look(plan: StepPlan, running: list[Request]) -> Look:
    """Who runs, and the blocks of each with the tokens that they hold after the step."""
    new = {work.request.id: len(work.tokens) for work in plan.work}
    tables = {r.id: (tuple(r.table.blocks), r.table.n_tokens + new.get(r.id, 0)) for r in running}
    return list(running), tables


def draw(
    requests: str, policy: str, chunks: str, places: int, budget: int, blocks: int,
    block_size: int, width: int,
) -> str:  # fmt: skip
    """A column for each step, a row for each place; below, the queue and the pool of each step."""
    pairs = parsed(requests)
    made = frames(pairs, policy, chunks == "yes", places, budget, blocks, block_size)
    counts = [_counts(made[: i + 1], len(pairs), places) for i in range(len(made))]
    pools = "".join(
        f'<div class="frame" data-frame="{i}"{" hidden" * (i < len(made) - 1)}>{counts[i]}'
        f"{_waiting(frame)}{_pool(frame, blocks, block_size, width)}</div>"
        for i, frame in enumerate(made)
    )
    steps = _steps(made, places, width)
    return f'<div class="movie" data-frames="{len(made)}">{steps}{pools}</div>'


def name(request: int) -> str:
    """A letter for a request."""
    return "ABCDEFGHIJKLMNOP"[request]


def colour(request: int) -> str:
    """Its colour, as a class."""
    return COLOURS[request % len(COLOURS)]


def _steps(made: list[Frame], places: int, width: int) -> str:
    left = 50
    wide = min(34.0, (width - left - 4) / max(len(made), 12))
    height, parts = 28, []
    for row in range(places):
        parts.append(text(0, row * height + 17, f"place {row + 1}", "small"))
    for i, frame in enumerate(made):
        x, drawn = left + i * wide, []
        taken = {seat: request for request, seat in frame.seats.items()}
        for row in range(places):
            y, request = row * height, taken.get(row)
            if request is None:
                drawn.append(box(x, y, wide - 1.5, 24, "idle"))
                continue
            n, decoded = frame.work.get(request, (0, False))
            hint = f"step {i + 1}: {name(request)} computes {n} token{'s' * (n != 1)}"
            kind = colour(request) if n else "idle"
            drawn.append(box(x, y, wide - 1.5, 24, kind, hint=hint))
            if n and not decoded:
                drawn.append(box(x, y + 18, wide - 1.5, 6, "foot"))
            if request in frame.begins and wide > 9:
                middle = x + (wide - 1.5) / 2
                drawn.append(text(middle, y + 15, name(request), "letter", "middle"))
            if request in frame.ends:
                drawn.append(box(x + wide - 4, y, 2.5, 24, "edge"))
        back = "".join(name(request) for request in frame.sent_back)
        if back:
            y = places * height + 13
            drawn.append(text(x + wide / 2, y, f"↩{back}", "label red", "middle"))
        parts.append(f'<g data-step="{i}">{"".join(drawn)}</g>')
    told = f"{len(made)} steps in {places} places"
    return picture(width, places * height + 20, parts, told)


def _counts(made: list[Frame], n_requests: int, places: int) -> str:
    frame = made[-1]
    idle = sum(places - sum(n > 0 for n, _ in f.work.values()) for f in made)
    back, ended = sum(len(f.sent_back) for f in made), sum(len(f.ends) for f in made)
    return (
        f'<p class="counts"><span><b>{len(made)}</b> steps</span><span><b>{idle}</b> idle '
        f"squares</span><span><b>{ended}</b> of {n_requests} answered</span><span>"
        f"<b>{seconds(frame.now)}</b> on the clock</span><span><b>{back}</b> sent back</span></p>"
    )


def _waiting(frame: Frame) -> str:
    queue = "".join(f'<i class="{colour(r)}">{escape(name(r))}</i>' for r in frame.waiting)
    return f'<p class="queue">waiting: {queue or "nobody"}</p>'


def _pool(frame: Frame, blocks: int, block_size: int, width: int) -> str:
    """Every block: who holds it, and how much of it is full."""
    across = min(blocks, 24 if width > 500 else 12)
    wide = min(34.0, width / across)
    parts = [box(b % across * wide, 18 + b // across * 26, wide - 2, 22, "empty")
             for b in range(blocks)]  # fmt: skip
    parts.insert(0, text(0, 11, "the pool of blocks, after the step", "small"))
    held = 0
    for request, (table, n_tokens) in frame.tables.items():
        held += len(table)
        for i, block in enumerate(table):
            x, y = block % across * wide, 18 + block // across * 26
            full = min(block_size, max(0, n_tokens - i * block_size)) / block_size
            parts.append(box(x, y, wide - 2, 22, f"{colour(request)} pale"))
            parts.append(box(x, y, (wide - 2) * full, 22, colour(request)))
            middle = x + (wide - 2) / 2
            parts.append(text(middle, y + 15, name(request), "letter", "middle"))
    told = f"{held} of {blocks} blocks are held"
    return picture(width, 20 + 26 * -(-blocks // across), parts, told)
