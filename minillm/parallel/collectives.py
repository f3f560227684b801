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
import os
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from minillm.model import Decoder

TIMEOUT = datetime.timedelta(seconds=50)
"""A collective that takes longer fails: some rank is gone."""


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
    if _device_type() == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if _device_type() == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    atexit.register(_left)


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _left() -> None:
    """Without it a thread that still listens would abort the process at its end."""
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

    calls and sent: by collective, calls and bytes by the formulas above.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict) -> "Group":
        return self  # the copies of a model talk to the same ranks

    def global_rank(self, rank: int) -> int:
        """The number that this group's `rank` has among all ranks."""
        return dist.get_global_rank(self._group or dist.group.WORLD, rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of everyone's x, in x."""
        self.note("all_reduce", 2 * x.nbytes * (self.size - 1) / self.size)
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Everyone's x, all of one shape, one after another along `dim`."""
        self.note("all_gather", x.nbytes * (self.size - 1))
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum of everyone's x; the size divides it."""
        self.note("reduce_scatter", x.nbytes * (self.size - 1) / self.size)
        parts = [part.contiguous() for part in x.chunk(self.size, dim)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=self._group)
        return mine

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The source's x, in everyone's x."""
        self.note("broadcast", x.nbytes if self.rank == source else 0)
        dist.broadcast(x, self.global_rank(source), group=self._group)
        return x

    def same_everywhere(self, what: str, value: str) -> None:
        """ValueError, on all ranks, if some rank's value is not that of rank 0."""
        values: list[str] = [""] * self.size
        dist.all_gather_object(values, value, group=self._group)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"Rank {rank} has another {what} than rank 0: {other} and {values[0]}; start "
                    "all ranks alike."
                )

    @classmethod
    def sharing(cls, model: Decoder) -> "Group":
        """All ranks; ValueError, on all of them, if their models differ in config or dtype."""
        started()
        group = cls()
        group.same_everywhere("model", f"{model.config}, {model.dtype}")
        return group

    @classmethod
    def grid(cls, rows: int) -> "tuple[Group, Group]":
        """All ranks as a table of so many rows: the ranks in this one's row, and in its column.

        Neighbours in a row are neighbours in number, so they share a machine if any ranks do.
        """
        n = dist.get_world_size() // rows
        mesh = init_device_mesh(_device_type(), (rows, n), mesh_dim_names=("column", "row"))
        return cls(mesh.get_group("row")), cls(mesh.get_group("column"))

    def note(self, name: str, sent: float) -> None:
        """Count a call and what this rank sends in it."""
        self.calls[name] += 1
        self.sent[name] += round(sent)
