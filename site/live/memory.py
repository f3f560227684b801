"""Where cache memory goes: five ways to hand it out, by `minillm.fragmentation.simulate`."""

import random
from html import escape

from live.controls import Choice, Slider
from live.svg import box, legend, number, picture, shares, text
from minillm.fragmentation import POLICIES, Sample, simulate

SEQUENCES, MAX_LEN, COLUMNS = 32, 512, 120
STATES = (
    ("used", "blue", "holds a token"),
    ("reserved", "sky", "reserved for a token to come"),
    ("internal", "orange", "reserved and never used"),
    ("external", "red", "free, but in pieces that are too small"),
    ("free", "empty", "free"),
)
TRACES = {
    "mixed": "prompts and answers of all lengths",
    "short": "short answers, seldom a long one",
    "long": "long answers to short prompts",
}

CONTROLS = (
    Choice("policy", "look at", {name: name for name in POLICIES}, "max"),
    Choice("trace", "requests", TRACES, "mixed"),
    Slider("slots", "slots in the pool", [512, 1024, 2048, 4096, 8192], 2048),
    Slider("block_size", "tokens in a block", [1, 4, 8, 16, 32, 64, 128], 16),
    Slider("seed", "seed", [0, 1, 2, 3, 4, 5, 6, 7], 0),
)


def trace_of(kind: str, seed: int) -> list[tuple[int, int]]:
    """`SEQUENCES` requests as (prompt tokens, answer tokens), at most `MAX_LEN` together."""
    whole = random.Random(seed).randint
    if kind == "mixed":
        return [(whole(10, 250), whole(10, 250)) for _ in range(SEQUENCES)]
    if kind == "short":
        return [(whole(10, 120), whole(200, 380) if i % 8 == 0 else whole(5, 40))
                for i in range(SEQUENCES)]  # fmt: skip
    return [(whole(5, 40), whole(100, 400)) for _ in range(SEQUENCES)]


def draw(policy: str, trace: str, slots: int, block_size: int, seed: int, width: int) -> str:
    """The pool over time under one policy, and the mean of all five."""
    requests = trace_of(trace, seed)
    runs = {
        name: simulate(requests, name, n_slots=slots, max_len=MAX_LEN, block_size=block_size)
        for name in POLICIES
    }
    rows = [(name, [(_mean(run, state), colour, what) for state, colour, what in STATES])
            for name, run in runs.items()]  # fmt: skip
    table = "".join(
        f"<tr><td>{name}</td><td>{len(run):,}</td><td>{number(_running(run))}</td>"
        f"<td>{_mean(run, 'used') / slots:.0%}</td><td>{sum(s.sent_back for s in run)}</td></tr>"
        for name, run in runs.items()
    )
    return "".join(
        (
            legend([(colour, what) for _, colour, what in STATES]),
            _over_time(runs[policy], policy, slots, width),
            '<p class="note">All five, on average over their steps:</p>',
            shares(rows, width=width, title="Slots by state", total=slots),
            "<table><tr><th>policy</th><th>steps for all</th><th>sequences at a time</th>"
            f"<th>slots with a token</th><th>sent back</th></tr>{table}</table>",
        )
    )


def _mean(run: list[Sample], state: str) -> float:
    return sum(getattr(sample, state) for sample in run) / len(run)


def _running(run: list[Sample]) -> float:
    return sum(sample.running for sample in run) / len(run)


def _over_time(run: list[Sample], policy: str, slots: int, width: int) -> str:
    """The pool as columns: each a step, or the first of a few steps where there are many."""
    every = -(-len(run) // COLUMNS)
    columns = run[::every]
    wide, height, parts = width / len(columns), 150, []
    for i, sample in enumerate(columns):
        y = 20.0 + height
        for state, colour, what in STATES:
            high = height * getattr(sample, state) / slots
            y -= high
            hint = f"step {i * every + 1}: {getattr(sample, state)} of {slots} slots, {what}"
            if high:
                parts.append(box(i * wide, y, wide, high, colour, hint=hint))
    parts.append(text(0, 12, f"policy {escape(policy)}: the pool, step by step", "small"))
    parts.append(text(width, height + 34, f"{len(run)} steps", "small", "end"))
    told = f"Policy {policy}: {_mean(run, 'used') / slots:.0%} of the slots hold a token"
    return picture(width, height + 38, parts, told)
