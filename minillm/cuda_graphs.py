"""Decode steps as CUDA graphs: captured once for a few batch sizes, then replayed.

A decode step of a small model is hundreds of kernels of a few microseconds each; launching them
one by one from Python takes longer than running them. A graph replays all of them at once, from
the same tensors, which get each step's numbers before. Rows beyond the requests at hand are
padding: a sequence of one token in a block of its own.
Not run on a GPU yet.
"""

from array import array

import torch
from torch import Tensor

from minillm.blocks import BlockTable
from minillm.kernels import why_not_triton
from minillm.model import Decoder
from minillm.paged import PagedBatch, PagedKVCache


class DecodeGraphs:
    """One token more of each of up to `max_seqs` sequences of `cache`."""

    def __init__(self, model: Decoder, cache: PagedKVCache, max_seqs: int):
        device = model.device
        if device.type != "cuda":
            raise ValueError(
                f"cuda_graphs needs a model on a CUDA device; this one is on {device}. "
                "Leave it off."
            )
        query = torch.empty(0, 1, model.config.d_head, dtype=model.dtype, device=device)
        if cache.backend not in ("auto", "triton") or why_not_triton(query, 1.0):
            raise ValueError(
                "cuda_graphs needs the backend 'triton', whose launches do not depend on the "
                "numbers; leave it off."
            )
        self._model, self._cache = model, cache
        self._sizes = sorted({min(2**i, max_seqs) for i in range(max_seqs.bit_length() + 1)})
        manager = cache.manager
        most = -(-model.config.max_seq_len // manager.block_size)
        self._width = min(manager.allocator.n_blocks, most)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, PagedBatch, Tensor]] = {}
        self.claim_padding()

    def claim_padding(self) -> None:
        """Take the padding's block, as the first one of a fresh or reset block manager."""
        self._padding = BlockTable(array("i", [self._cache.manager.allocator.allocate()]))

    def run(self, tables: list[BlockTable], tokens: list[int]) -> Tensor:
        """Logits (n_requests, V) after one more token of each."""
        n = len(tables)
        size = next(size for size in self._sizes if size >= n)
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        graph, static_tokens, batch, logits = self._captured[size]
        batch.refill([*tables, *[self._padding] * (size - n)])
        static_tokens.copy_(torch.tensor([tokens + [0] * (size - n)]))
        graph.replay()
        for table in tables:
            table.n_tokens += 1
        return logits[:n]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, PagedBatch, Tensor]:
        tokens = torch.zeros(1, size, dtype=torch.int64, device=self._model.device)
        batch = PagedBatch(self._cache, [self._padding] * size, [1] * size, width=self._width)

        def forward() -> Tensor:
            logits = self._model(tokens, batch)[0]
            self._padding.n_tokens = 0  # the forward pass has counted it on
            return logits

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile the kernels and reserve the libraries' workspaces before
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = forward()
        return graph, tokens, batch, logits
