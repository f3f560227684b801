"""What one step holds: who computes which tokens, and whose logits are wanted. No tensors."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.blocks import BlockTable
from minillm.serving.request import Request


class Item(NamedTuple):
    """One sequence's part of a step, as the model runner takes it."""

    table: BlockTable
    tokens: list[int]  # they follow what the table holds
    n_logits: int  # of how many of the last tokens the logits are wanted


@dataclass(frozen=True)
class Work:
    """One request's part of a step.

    rows: its rows of the step's logits. None in the middle of a prompt, one at its end and in
    decoding, one more for each draft token.
    """

    request: Request
    tokens: list[int]
    rows: range
    decoding: bool


@dataclass
class StepPlan:
    """One step: who computes what, decodes first; and blocks that must be copied before it."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def items(self) -> list[Item]:
        """The work without its requests."""
        return [Item(work.request.table, work.tokens, len(work.rows)) for work in self.work]

    def begin(self, now: float) -> None:
        """Stamp the requests that take part in a step for the first time."""
        for work in self.work:
            if math.isnan(work.request.admitted_at):
                work.request.admitted_at = now

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens computed for prompts, tokens computed for decoding requests, tokens cached.

        The last is the sum over all who take part, and grows when the step is computed.
        """
        decoded = sum(len(work.tokens) for work in self.work if work.decoding)
        prefilled = sum(len(work.tokens) for work in self.work) - decoded
        return prefilled, decoded, sum(work.request.table.n_tokens for work in self.work)


class StepDraft:
    """The step that is being planned: tokens chosen so far, and how many more it has room for."""

    def __init__(self, budget: int):
        self.budget = budget
        self.chosen: dict[Request, int] = {}  # tokens that each computes
        self.copies: list[tuple[int, int]] = []

    def add(self, request: Request, n: int) -> None:
        self.chosen[request] = self.chosen.get(request, 0) + n
        self.budget -= n

    def remove(self, request: Request) -> None:
        """Its blocks are about to be given back. The budget stays spent."""
        gone = set(request.table.blocks)
        self.copies = [pair for pair in self.copies if pair[1] not in gone]
        self.chosen.pop(request, None)

    def plan(self) -> StepPlan:
        """Decodes first; the rows of the logits in the same order."""
        plan, row = StepPlan(copies=self.copies), 0
        for request in sorted(self.chosen, key=lambda request: not request.decoding):
            n, tokens = self.chosen[request], request.ids[request.table.n_tokens :]
            decoding, n_rows = request.decoding, int(n >= len(tokens))
            if decoding:
                tokens, n_rows = tokens + request.draft_tokens[: n - 1], n
            plan.work.append(Work(request, tokens[:n], range(row, row + n_rows), decoding))
            row += n_rows
        return plan
