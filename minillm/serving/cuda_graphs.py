"""Decode steps as CUDA graphs: captured for a few batch sizes, then replayed.

Source: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs".
Cost: a decode step is hundreds of kernels of a few microseconds each, and launching them one by one
from Python takes longer than running them. A graph replays all of them at once. It reads the same
tensors every time, so each step's numbers are copied there first: a token and a length for each
sequence, and of the block tables only the entries that are new. All else is worked out inside of
the graph, the greedy token included.

    DecodeRows      the tensors that a step reads, and the step itself
    DecodeGraphs    that step, captured for several numbers of sequences
    GraphedSequence one sequence through a prompt and graphs: a step for `generate` on a GPU

Rows beyond the sequences at hand are padding: a sequence of one token in a block of its own.
Not here: prompts, whose lengths are too many to capture.
Not run on a GPU yet.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.blocks import BlockTable
from minillm.generation import prefill
from minillm.kernels.availability import why_not_triton
from minillm.model import Decoder
from minillm.paged import PagedKVCache, PagedStep
from minillm.sampling import greedy

WORTH_CAPTURING = 32
"""New tokens from which on `graphed_step` captures: it takes as long as three or four steps."""


class DecodeRows:
    """What a decode step of up to `max_seqs` sequences reads: tensors that stay where they are."""

    def __init__(self, model: Decoder, cache: PagedKVCache, max_seqs: int):
        size, n_blocks = cache.manager.block_size, cache.manager.allocator.n_blocks
        width = min(n_blocks, -(-model.config.max_seq_len // size))
        self._model, self._cache = model, cache
        zeros = {"dtype": torch.int32, "device": model.device}
        self._tables = torch.zeros(max_seqs, width, **zeros)
        self._inputs = torch.zeros(2 * max_seqs, **zeros)  # tokens, then lengths with them
        self._held: list[BlockTable | None] = [None] * max_seqs  # the table that each row holds

    def fill(self, tables: Sequence[BlockTable], tokens: Sequence[int]) -> None:
        """Bring the rows up to date for one new token of each sequence.

        Invariant: row i of the device's tables holds the first `copied` entries of `_held[i]`. So
        only the entries after them are copied, usually none: a sequence needs a new block once in
        `block_size` steps. A table that was not in row i in the last step is copied whole.
        """
        places, blocks = array("q"), array("i")  # new entries: where in the flat tables, and what
        for i, table in enumerate(tables):
            known = table.copied if self._held[i] is table else 0
            if known < len(table.blocks):
                first = i * self._tables.shape[1]
                places.extend(range(first + known, first + len(table.blocks)))
                blocks.extend(table.blocks[known:])
            self._held[i], table.copied = table, len(table.blocks)
        # The other rows hold nothing now: their tables may grow in another row before they return.
        self._held[len(tables) :] = [None] * (len(self._held) - len(tables))
        device = self._tables.device
        if places:
            where = torch.frombuffer(places, dtype=torch.int64).to(device)
            what = torch.frombuffer(blocks, dtype=torch.int32).to(device)
            self._tables.view(-1).index_copy_(0, where, what)
        numbers = array("i", [*tokens, *[table.n_tokens + 1 for table in tables]])
        self._inputs[: len(numbers)].copy_(torch.frombuffer(numbers, dtype=torch.int32))

    @torch.inference_mode()
    def step(self, n: int) -> tuple[Tensor, Tensor]:
        """Logits (n, V) after the first n rows' tokens, and the greedy token of each, (n,).

        Nothing comes from the host or goes to it, so that this can be captured.
        """
        tokens, lens = self._inputs[: 2 * n].view(2, n)
        batch = PagedStep.of_one_token_each(self._cache, self._tables[:n], lens)
        logits = self._model(tokens[None], batch)[0]
        return logits, greedy(logits)


def graph_sizes(max_seqs: int) -> list[int]:
    """The numbers of sequences to capture: 1, 2, 4, then steps of 8, beyond 64 steps of 32."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, max_seqs, 32)]
    return [n for n in steps if n < max_seqs] + [max_seqs]


def why_no_graphs(model: Decoder, backend: str) -> str | None:
    """A sentence that says why this model's decode steps can't be captured, or None."""
    if model.device.type != "cuda":
        return (
            f"cuda_graphs needs a model on a CUDA device; this one is on {model.device}. "
            "Leave it off."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "cuda_graphs is for one rank; leave it off."
    query = torch.empty(0, 1, model.config.d_head, dtype=model.dtype, device=model.device)
    if backend not in ("auto", "triton") or why_not_triton(query, 1.0):
        return (
            "cuda_graphs needs the backend 'triton', whose launches do not depend on the "
            "numbers; leave it off."
        )
    return None


class DecodeGraphs:
    """One token more of each of up to `max_seqs` sequences of `cache`, captured when made."""

    def __init__(self, model: Decoder, cache: PagedKVCache, max_seqs: int):
        if why_not := why_no_graphs(model, cache.backend):
            raise ValueError(why_not)
        _, stored, *scales = (x.dtype for x in cache.storage.layers[0])
        if stored != model.dtype and not scales:
            raise ValueError(
                f"cuda_graphs needs a cache that the kernels read as it is, in {model.dtype}, and "
                f"this one holds {stored}; leave it off."
            )
        self._cache, self._rows = cache, DecodeRows(model, cache, max_seqs)
        self._sizes = graph_sizes(max_seqs)
        self.claim_padding()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        with torch.cuda.device(model.device):
            # The largest first: the others fit into its memory.
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(self._sizes):
                self._graphs[size] = self._capture(size, pool)

    def claim_padding(self) -> None:
        """Take the padding's block, as the first one of a fresh or reset block manager."""
        self._padding = BlockTable(array("i", [self._cache.manager.allocator.allocate()]))

    def run(self, tables: Sequence[BlockTable], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits (n, V) after one more token of each of n sequences; the greedy tokens (n,)."""
        n = len(tables)
        size = next(size for size in self._sizes if size >= n)
        graph, logits, best = self._graphs[size]
        with torch.cuda.device(logits.device):
            self._rows.fill([*tables, *[self._padding] * (size - n)], [*tokens, *[0] * (size - n)])
            graph.replay()
        for table in tables:
            table.n_tokens += 1
        return logits[:n], best[:n]

    def _capture(
        self, size: int, pool: tuple[int, int]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        self._rows.fill([self._padding] * size, [0] * size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile the kernels and reserve the libraries' workspaces before
                self._rows.step(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits, best = self._rows.step(size)
        return graph, logits, best


class GraphedSequence:
    """A sequence of at most `max_len` tokens: single tokens are replayed, prompts run as usual.

    A `Step` of `minillm.generation`.
    """

    def __init__(self, model: Decoder, max_len: int, backend: str = "auto"):
        n_blocks = -(-max_len // 16) + 1  # one for the padding
        self._model = model
        self._cache = PagedKVCache(model, n_blocks, 16, prefix_caching=False, backend=backend)
        self._graphs = DecodeGraphs(model, self._cache, 1)
        self._table = BlockTable()
        self._cache.reserve(self._table, max_len)

    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits (V,) of the token after `tokens`, which follow what came before."""
        if len(tokens) == 1:
            logits, _ = self._graphs.run([self._table], tokens)
            return logits[0]
        batch = self._cache.batch([self._table], [len(tokens)])
        return prefill(self._model, tokens, batch)


def graphed_step(
    model: Decoder, n_prompt: int, max_new_tokens: int, backend: str = "auto"
) -> GraphedSequence | None:
    """The `step` for `generate` where decode steps can be captured and that pays; else None."""
    if max_new_tokens < WORTH_CAPTURING or why_no_graphs(model, backend):
        return None
    return GraphedSequence(model, n_prompt + max_new_tokens, backend)
