"""The package's own parts under the reader's names, for those that a reader has not built.

Lesson 14 makes an engine of parts. `part` gives the reader's where the folder has it, and one of
these where it does not. They only rename: each calls what the rest of the package uses.
"""

import functools
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from minillm.blocks import BlockAllocator, BlockManager, BlockTable
from minillm.cache import Cache
from minillm.config import ModelConfig
from minillm.layers.attention import attention
from minillm.mine.checks import Item
from minillm.mine.kept import load
from minillm.model import Decoder
from minillm.serving.metrics import summarize
from minillm.serving.request import Completion, Request
from minillm.serving.scheduler import Scheduler


def part(file: str) -> tuple[ModuleType | SimpleNamespace, str]:
    """A part and whose it is, "yours" or "the package's".

    file: its name in the reader's folder. Raises KeyError for a part that is neither kept nor here.
    """
    yours = load(file)
    return (yours, "yours") if yours is not None else (OURS[file], "the package's")


@functools.lru_cache(maxsize=1)
def _decoder(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config).eval().requires_grad_(False)


def my_decoder(
    weights: dict[str, Tensor], config: ModelConfig, tokens: Tensor, cache: Cache
) -> Tensor:
    """Logits (B, T, V) of token ids (B, T), with `Decoder`'s parameters by name."""
    model = _decoder(config)
    model.load_state_dict(weights, strict=False, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model(tokens, cache)


class CountingPool(BlockAllocator):
    """A `BlockAllocator` with the names of lesson 06."""

    def n_free(self) -> int:  # type: ignore[override]
        """How many blocks nobody holds."""
        return len(self._free)


def slots_of(blocks: Sequence[int], n_tokens: int, n_new: int, P: int) -> list[int]:
    """The slots of tokens n_tokens … n_tokens + n_new - 1."""
    return [blocks[i // P] * P + i % P for i in range(n_tokens, n_tokens + n_new)]


def room_for_next(
    pool: CountingPool, table: list[int], n_tokens: int, P: int
) -> tuple[int, int] | None:
    """Room for one more token; (from, to) where a shared block must be copied first."""
    at = n_tokens // P
    if at == len(table):
        table.append(pool.allocate())
        return None
    old = table[at]
    if pool.ref_count(old) == 1:
        return None
    table[at] = pool.allocate()
    pool.free(old)
    return old, table[at]


def plan_step(
    running: Sequence[Item],
    waiting: Sequence[Item],
    places: int,
    budget: int,
    free: int,
    P: int,
) -> tuple[dict[int, int], list[int]]:
    """The plan of a `Scheduler` in this state: tokens for each name, and who is sent back."""
    held = sum(-(-item.done // P) for item in running)
    manager = BlockManager(held + free, P, prefix_caching=False)
    scheduler = Scheduler(manager, max_seqs=places, max_batch_tokens=max(budget, places))
    requests = {item.name: _request(item, manager) for item in (*running, *waiting)}
    scheduler.running = [requests[item.name] for item in running]
    scheduler.waiting.extend(requests[item.name] for item in waiting)
    plan = scheduler.schedule()
    back = [item.name for item in reversed(running) if requests[item.name] not in scheduler.running]
    return {work.request.id: len(work.tokens) for work in plan.work}, back


def _request(item: Item, manager: BlockManager) -> Request:
    request = Request(item.name, [0] * item.prompt, item.produced + 1, table=BlockTable())
    request.ids += [0] * item.produced
    manager.reserve(request.table, item.done)
    request.table.n_tokens = item.done
    return request


def stamps_to_metrics(requests: Sequence[tuple[float, Sequence[float]]]) -> dict:
    """p50 and p99 of TTFT, TPOT and ITL, and the longest gap, in seconds."""
    completions = [
        Completion(i, 1, [0] * len(s), "length", sent, [t - sent for t in s], s[-1] - sent)
        for i, (sent, s) in enumerate(requests)
    ]
    total = summarize(completions)
    kinds = {"ttft": total.ttft, "tpot": total.tpot, "itl": total.inter_token}
    return {name: (four[1], four[3]) for name, four in kinds.items()} | {
        "longest": total.longest_pause
    }


OURS = {
    "decoder": SimpleNamespace(my_decoder=my_decoder),
    "grouped_attention": SimpleNamespace(grouped=attention),
    "allocator": SimpleNamespace(
        CountingPool=CountingPool, slots_of=slots_of, room_for_next=room_for_next
    ),
    "scheduler": SimpleNamespace(plan_step=plan_step),
    "metrics": SimpleNamespace(stamps_to_metrics=stamps_to_metrics),
}
"""Those that lesson 14's engine is made of, by the name of their file."""
