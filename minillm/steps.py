"""A step of the engine in numbers: tokens through the model, new tokens from its logits."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from minillm.cuda_graphs import DecodeGraphs
from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.request import Request
from minillm.sampling import draw, likeliest
from minillm.scheduler import StepPlan

Taker = tuple[Request, range]
"""A request that gets tokens, and its rows of the logits: one, and one more for each guess."""


def forward(
    plan: StepPlan, model: Decoder, cache: PagedKVCache, graphs: DecodeGraphs | None
) -> tuple[Tensor, list[int], Tensor | None]:
    """Compute the plan's tokens.

    Returns the wanted logits (n_rows, V), in the order of the plan, the likeliest token of each
    row, and the states (n_rows, C) that they came from, which a CUDA graph does not keep. The
    tokens are needed at once, so a GPU is done when this returns.
    """
    cache.copy(plan.copies)
    tables = [work.request.table for work in plan.work]
    n_new = [len(work.tokens) for work in plan.work]
    tokens = list(chain.from_iterable(work.tokens for work in plan.work))
    spans = zip(plan.work, accumulate(n_new), strict=True)
    wanted = [i for work, end in spans for i in range(end - work.n_logits, end)]
    if graphs is not None and max(n_new) == 1 and len(wanted) == len(tokens):
        logits, best = graphs.run(tables, tokens)
        states = None
    else:
        row = torch.tensor([tokens], device=model.device)  # (1, N)
        hidden = model.hidden(row, cache.batch(tables, n_new))[0]
        states = hidden[torch.tensor(wanted, device=hidden.device).long()]
        logits = model.head(states)
        best = likeliest(logits)
    return logits, best.tolist(), states


def draw_tokens(takers: Sequence[Taker], logits: Tensor, best: list[int]) -> list[list[int]]:
    """A token from each row of each taker, greedy or sampled; all sampled rows at once.

    The token `i` places after a request's newest one is drawn with the uniform number of that
    place, so it depends on no other request.
    """
    drawn = iter(
        draw(
            logits,
            best,
            [row for _, rows in takers for row in rows],
            [request.sampling for request, rows in takers for _ in rows],
            [request.uniform(i) for request, rows in takers for i in range(len(rows))],
        )
    )
    return [[next(drawn) for _ in rows] for _, rows in takers]
