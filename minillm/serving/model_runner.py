"""The model runner: tokens of many sequences through the model, new tokens from its logits.

Sources: Yu et al. 2022 (Orca), section 3.2 (selective batching): one ragged row for all sequences.
Cost: that of `minillm.serving.engine`'s step. It knows blocks and tokens, no requests.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.sampling import TokenLogprobs, greedy, next_tokens, token_logprobs
from minillm.serving.cuda_graphs import DecodeGraphs
from minillm.serving.request import Request
from minillm.serving.step_plan import Item


def forward(
    items: Sequence[Item],
    copies: Sequence[tuple[int, int]],
    model: Decoder,
    cache: PagedKVCache,
    graphs: DecodeGraphs | None,
) -> tuple[Tensor, list[int], Tensor | None]:
    """Run one engine step: copy blocks, then the forward pass of all items.

    Returns the wanted logits (n_rows, V), in the order of the items, the greedy token of each row,
    and the hidden states (n_rows, C) behind them, which a CUDA graph does not keep. The tokens are
    needed at once, so a GPU is done when this returns.
    """
    cache.copy(copies)
    tables = [item.table for item in items]
    n_new = [len(item.tokens) for item in items]
    tokens = list(chain.from_iterable(item.tokens for item in items))  # N ids, ragged
    ends = accumulate(n_new)
    spans = zip(items, ends, strict=True)
    wanted = [i for item, end in spans for i in range(end - item.n_logits, end)]
    if graphs is not None and max(n_new) == 1 and len(wanted) == len(tokens):
        logits, best = graphs.run(tables, tokens)
        return logits, best.tolist(), None
    row = torch.tensor([tokens], device=model.device)  # (1, N)
    hidden = model.hidden(row, cache.batch(tables, n_new))[0]  # (N, C)
    # The head is needed only where the next token is.
    hidden = hidden[torch.tensor(wanted, device=hidden.device).long()]  # (n_rows, C)
    logits = model.head(hidden)
    return logits, greedy(logits).tolist(), hidden


def draw_tokens(
    rows: Mapping[Request, range], logits: Tensor, best: list[int]
) -> dict[Request, list[int]]:
    """A token from each of the given rows of logits (n_rows, V), whose greedy tokens are `best`.

    rows: of each request that gets tokens. The token `i` places after a request's newest one is
    drawn with the uniform number of that place, so it depends on no other request.
    """
    flat = [row for own in rows.values() for row in own]
    if flat != list(range(len(best))):  # samples of one prompt begin with the same logits
        logits, best = logits[flat], [best[row] for row in flat]
    drawn = iter(
        next_tokens(
            logits,
            [request.sampling for request, own in rows.items() for _ in own],
            [request.uniform(i) for request, own in rows.items() for i in range(len(own))],
            best,
        )
    )
    return {request: [next(drawn) for _ in own] for request, own in rows.items()}


def drawn_logprobs(
    rows: Mapping[Request, range], logits: Tensor, drawn: Mapping[Request, list[int]]
) -> dict[Request, list[TokenLogprobs]]:
    """The log-probabilities of the drawn tokens, of the requests that ask for them."""
    asked = {request: own for request, own in rows.items() if request.top_logprobs is not None}
    if not asked:
        return {}
    flat = [row for own in asked.values() for row in own]
    tokens = [token for request in asked for token in drawn[request]]
    most = max(request.top_logprobs for request in asked)
    found = iter(token_logprobs(logits[flat], tokens, most))
    return {
        request: [
            each._replace(top=each.top[: request.top_logprobs])
            for each in (next(found) for _ in own)
        ]
        for request, own in asked.items()
    }
