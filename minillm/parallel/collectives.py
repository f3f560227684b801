"""What ranks tell each other: collectives over torch.distributed, and a ledger of their bytes.

Sources: Patarasuk and Yuan 2009 (ring all-reduce), for the bytes; Korthikanti et al. 2022, section
4.2, for the all-reduce as a reduce-scatter and an all-gather.
Cost: bytes that each of p ranks sends, for a tensor of n bytes in all:

    all_reduce       2 n (p - 1) / p      everyone gets the sum
    all_gather         n (p - 1) / p      everyone gets everyone's part
    reduce_scatter     n (p - 1) / p      everyone gets a part of the sum
    broadcast          n                  counted for the source: everyone gets its tensor
"""

import atexit
import datetime
import importlib
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.model import Decoder
from minillm.quantization.quantize import stored_as

TIMEOUT = datetime.timedelta(seconds=50)
"""A collective that takes longer fails: some rank hangs. One that is gone is noticed at once."""
PATIENCE = datetime.timedelta(days=1)
"""Where ranks may wait long for good reasons: for a file to be read, for the next request."""


def started() -> None:
    """Join the other ranks, once; the environment says who and where they are, as torchrun sets it.

    RuntimeError outside torchrun.
    """
    if dist.is_initialized():
        return
    if not inside_torchrun():
        raise RuntimeError(
            "This process was not started by torchrun; start torchrun --nproc-per-node N, or "
            "python -m minillm.parallel."
        )
    if (device := own_device()).type == "cuda":
        torch.cuda.set_device(device)
    # Its functions keep the group that exists when it is imported: none yet.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(_backend(), timeout=TIMEOUT)
    atexit.register(left)


def own_device() -> torch.device:
    """This rank's GPU; the CPU where there are fewer GPUs than ranks on this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= here:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if own_device().type == "cuda" else "gloo"


def patient_group() -> "dist.ProcessGroup":
    """A group for messages on the CPU that may be long in coming; all ranks must ask for it."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def wait_for_all() -> None:
    """Until all ranks are here, however long that takes."""
    group = patient_group()
    dist.barrier(group)
    dist.destroy_process_group(group)


def left() -> None:
    """Ends the threads that still listen: one of them could abort the process at its end.

    They end with the last reference to the group, so no module may have been given one.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def inside_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """How many ranks there are; 1 outside torchrun. No rank is asked."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Group:
    """The ranks that share a model, and what this one has sent to the others.

    sent: bytes by the formulas above, for each collective.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.process_group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict) -> "Group":
        return self  # the copies of a model talk to the same ranks

    def global_rank(self, rank: int) -> int:
        """The number that this group's `rank` has among all ranks."""
        return dist.get_global_rank(self.process_group or dist.group.WORLD, rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of everyone's x, in x."""
        self.note("all_reduce", 2 * x.nbytes * (self.size - 1) / self.size)
        dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Everyone's x, all of one shape, one after another along `dim`."""
        self.note("all_gather", x.nbytes * (self.size - 1))
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum of everyone's x; the size divides it."""
        self.note("reduce_scatter", x.nbytes * (self.size - 1) / self.size)
        parts = [part.contiguous() for part in x.chunk(self.size, dim)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=self.process_group)
        return mine

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The source's x, in everyone's x."""
        self.note("broadcast", x.nbytes if self.rank == source else 0)
        dist.broadcast(x, self.global_rank(source), group=self.process_group)
        return x

    def same_everywhere(self, what: str, value: str) -> None:
        """ValueError, on all ranks, if some rank's value is not that of rank 0."""
        values: list[str] = [""] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"Rank {rank} has another {what} than rank 0: {other} and {values[0]}; start "
                    "all ranks alike."
                )

    @classmethod
    def sharing(cls, model: Decoder, **settings: object) -> "Group":
        """All ranks; ValueError on all if their models' configs or formats, or settings, differ.

        ValueError for a model on another GPU than this rank's, RuntimeError outside torchrun.
        """
        started()
        wait_for_all()  # some may still read their model
        if model.device.type == "cuda" and model.device != own_device():
            raise ValueError(
                f"The model lies on {model.device}, and this rank computes on {own_device()}; "
                "load it there, or read only this rank's part with minillm.parallel.loading."
            )
        group = cls()
        group.same_everywhere("model", f"{model.config}, {stored_as(model)}, {model.dtype}")
        group.same_everywhere("setting", f"{settings}")
        return group

    @classmethod
    def grid(cls, rows: int) -> "tuple[Group, Group]":
        """All ranks as a table of so many rows: the ranks in this one's row, and in its column.

        Neighbours in a row are neighbours in number, so they share a machine if any ranks do.
        """
        size, rank = dist.get_world_size(), dist.get_rank()
        n = size // rows
        of_rows = [list(range(row * n, (row + 1) * n)) for row in range(rows)]
        of_columns = [list(range(column, size, n)) for column in range(n)]
        groups = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in of_rows + of_columns]
        return cls(groups[rank // n]), cls(groups[rows + rank % n])

    def note(self, name: str, sent: float) -> None:
        """Count what this rank sends in a call."""
        self.sent[name] += round(sent)
