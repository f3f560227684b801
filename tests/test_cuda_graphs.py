"""Decode steps as CUDA graphs, as far as that shows without a GPU.

The step that would be captured is run in the interpreter and watched on a stand-in for a GPU.
"""

import random
from array import array

import pytest
import torch
from interpreter import patch_once_a_launch
from models import lively, tiny_config

from minillm import Decoder, PagedKVCache, generate
from minillm.blocks import BlockTable
from minillm.quantization.kv_cache import storage_for
from minillm.serving.cuda_graphs import DecodeRows, graph_sizes, graphed_step, why_no_graphs

interpret = pytest.mark.interpret
patch_once_a_launch()


@interpret
@pytest.mark.parametrize("fused", [None, True], ids=["plain", "fused kernels"])
def test_decode_rows_give_the_full_forward(fused):
    """Sequences come, go, change places, stay away for a while, and are taken back a few tokens.

    Every step reads the same tensors, padding included, and gives what the whole sequence does.
    """
    model, whole = lively(size=0.1), lively(size=0.1)  # the same, and never with fused kernels
    model.fast = fused
    cache = PagedKVCache(model, 60, 4, backend="triton", prefix_caching=False)
    rows = DecodeRows(model, cache, 6)
    padding = BlockTable(array("i", [cache.manager.allocator.allocate()]))
    where = rows._tables.data_ptr(), rows._inputs.data_ptr()
    luck, sequences, largest = random.Random(1), [], 0
    with torch.inference_mode():
        for _ in range(16):
            if len(sequences) < 5 and luck.random() < 0.5:
                ids = [luck.randrange(97) for _ in range(luck.randrange(1, 9))]
                table = cache.manager.start(ids)
                cache.reserve(table, len(ids))
                model.hidden(torch.tensor([ids]), cache.batch([table], [len(ids)]))
                sequences.append((ids, table))
            if sequences and luck.random() < 0.1:
                cache.manager.release(sequences.pop(luck.randrange(len(sequences)))[1])
            for ids, table in sequences:
                n = min(luck.randrange(7), len(ids) - 1) if luck.random() < 0.2 else 0
                cache.manager.rewind(table, n)
                del ids[len(ids) - n :]
            taking = [s for s in sequences if luck.random() < 0.8]
            luck.shuffle(taking)
            if not taking:
                continue
            for ids, table in taking:
                ids.append(luck.randrange(97))
                cache.reserve(table, 1)
            n_padding = luck.randrange(2)
            tables = [table for _, table in taking] + [padding] * n_padding
            rows.fill(tables, [ids[-1] for ids, _ in taking] + [0] * n_padding)
            logits, best = rows.step(len(tables))
            assert torch.equal(best, logits.argmax(-1))
            for (ids, table), row in zip(taking, logits, strict=False):
                table.n_tokens += 1
                full = whole(torch.tensor([ids]))[0, -1]
                torch.testing.assert_close(row, full, atol=2e-5, rtol=2e-5)
            largest = max(largest, len(taking))
    assert largest >= 4 and where == (rows._tables.data_ptr(), rows._inputs.data_ptr())


def test_only_new_entries_of_tables_are_sent(monkeypatch):
    """A step of three long sequences sends an entry or two, not 600."""
    model = lively(max_seq_len=700)
    cache = PagedKVCache(model, 700, 1, prefix_caching=False)
    rows, sent = DecodeRows(model, cache, 3), []
    original = torch.Tensor.index_copy_

    def noted(self, dim, places, values):
        sent.append(places.tolist())
        return original(self, dim, places, values)

    monkeypatch.setattr(torch.Tensor, "index_copy_", noted)
    tables = [cache.manager.start([]) for _ in range(3)]
    for table in tables:
        cache.manager.reserve(table, 200)
        table.n_tokens = 200
    width = rows._tables.shape[1]
    rows.fill(tables, [0] * 3)
    assert [len(places) for places in sent] == [600]
    rows.fill(tables, [0] * 3)
    assert len(sent) == 1  # nothing is new
    cache.manager.reserve(tables[1], 1)
    rows.fill(tables, [0] * 3)
    assert sent[1:] == [[width + 200]]
    rows.fill([tables[1]], [0])  # has moved to the first row: all of it
    rows.fill(tables, [0] * 3)
    assert [len(places) for places in sent[2:]] == [201, 601]
    cache.manager.rewind(tables[2], 3)
    cache.manager.reserve(tables[2], 1)
    rows.fill(tables, [0] * 3)
    assert sent[-1] == [2 * width + 197]
    for i, table in enumerate(tables):
        assert rows._tables[i, : len(table.blocks)].tolist() == list(table.blocks)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
def test_a_step_brings_nothing_from_the_host(kv_dtype):
    """So that it can be captured: also for a model with scaled rotary positions (Llama 3.1)."""
    pytest.importorskip("triton", reason="needs the package triton, which exists for Linux")
    from stand_in_gpu import stand_in_gpu, transfers

    with torch.device("meta"):
        model = Decoder(tiny_config(rope_factors=(1.0, 2.0, 4.0, 8.0))).requires_grad_(False)
    model.fast = True
    cache = PagedKVCache(model, 9, 4, backend="triton", storage=storage_for(kv_dtype))
    rows = DecodeRows(model, cache, 4)
    with stand_in_gpu() as launches:
        rows.step(3)  # the warm-up, which makes the rotary tables
        launches.clear()
        with transfers() as seen:
            logits, best = rows.step(3)
        assert logits.shape == (3, 97) and best.shape == (3,)
        assert not seen
        names = {launch.kernel.fn.__name__ for launch in launches}
        assert "paged_kernel" in names
        # Rounding new rows is not the fused kernel's business.
        assert ("rope_and_write_kernel" in names) == (kv_dtype is None)
        paged = next(x for x in launches if x.kernel.fn.__name__ == "paged_kernel")
        assert paged.arguments["BITS"] == {None: 16, "int8": 8, "int4": 4}[kv_dtype]
        # It would be seen: a table that is made from numbers of the host.
        model._rope_tables = None
        with transfers() as seen:
            rows.step(3)
        assert seen


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (70, [1, 2, 4, *range(8, 65, 8), 70])],
)
def test_sizes_to_capture(most, sizes):
    assert graph_sizes(most) == sizes


def test_padding_is_never_much():
    """Of 130 sequences 130 to 160 are computed, not 256."""
    sizes = graph_sizes(256)
    for n in range(1, 257):
        size = next(size for size in sizes if size >= n)
        assert size - n <= (7 if n <= 64 else 31)
    assert len(sizes) < 20


def test_a_step_for_generate_where_it_pays(tiny):
    """None, which `generate` takes as its own step, without a GPU and for a few tokens."""
    assert graphed_step(tiny, 2, 40) is None
    expected = generate(tiny, [1, 2], 40)
    assert generate(tiny, [1, 2], 40, step=graphed_step(tiny, 2, 40)) == expected
    assert "cuda_graphs needs a model on a CUDA device; this one is" in why_no_graphs(tiny, "auto")
