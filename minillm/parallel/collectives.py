"""What ranks send each other: collectives over torch.distributed, and a ledger of their bytes.

Sources: Patarasuk and Yuan 2009 (ring all-reduce), for the bytes; Korthikanti et al. 2022, section
4.2, for the all-reduce as a reduce-scatter and an all-gather.
Cost: bytes that each of R ranks sends, for a tensor of n bytes in all:

    all_reduce       2 n (R - 1) / R      all ranks get the sum
    all_gather         n (R - 1) / R      all ranks get all parts
    reduce_scatter     n (R - 1) / R      each rank gets one part of the sum
    broadcast          n                  all ranks get the source's tensor; only the source counts
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
"""A collective that takes longer fails: some rank hangs. (A rank that died is noticed at once.)"""
PATIENCE = datetime.timedelta(days=3650)
"""Where a long wait is normal: while a file is read, or until a server's next request."""


def init() -> None:
    """Join the process group of torchrun's ranks, unless this process is in it already.

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
    # Imported first: its functions hold on to a group that exists when they are defined.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(_backend(), timeout=TIMEOUT)
    atexit.register(shutdown)


def own_device() -> torch.device:
    """This rank's GPU, or the CPU if this machine has fewer GPUs than ranks."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= here:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if own_device().type == "cuda" else "gloo"


def patient_group() -> "dist.ProcessGroup":
    """A gloo group whose messages may take up to `PATIENCE`; every rank must call this."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def wait_for_all() -> None:
    """Block until all ranks are here, however long that takes."""
    group = patient_group()
    dist.barrier(group)
    dist.destroy_process_group(group)


def shutdown() -> None:
    """Leave the process group and end its listening threads.

    A thread that still listens as Python exits could abort the process. The threads end with the
    last reference to the group, so no imported module may hold one.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def inside_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """The number of ranks, from the environment; 1 outside torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world_size(asked: str, size: int) -> None:
    """ValueError if torchrun did not start as many ranks as the options `asked` ask for."""
    if size != world_size():
        raise ValueError(
            f"{size} ranks are wanted by {asked}, but torchrun started {world_size()}; give both "
            "the same number."
        )


class Group:
    """The ranks that share a model, and what this one has sent to the others.

    sent: bytes by each collective, by the formulas above.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.process_group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict) -> "Group":
        return self  # copies of a model use the same ranks

    def global_rank(self, rank: int) -> int:
        """The number among all ranks of this group's `rank`."""
        return dist.get_global_rank(self.process_group or dist.group.WORLD, rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        self.note("all_reduce", 2 * x.nbytes * (self.size - 1) / self.size)
        dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' x, which have the same shape, concatenated along `dim`."""
        self.note("all_gather", x.nbytes * (self.size - 1))
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' x; the size must divide `dim`."""
        self.note("reduce_scatter", x.nbytes * (self.size - 1) / self.size)
        parts = [part.contiguous() for part in x.chunk(self.size, dim)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=self.process_group)
        return mine

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The x of rank `source`, written into x on every rank."""
        self.note("broadcast", x.nbytes if self.rank == source else 0)
        dist.broadcast(x, self.global_rank(source), group=self.process_group)
        return x

    def same_everywhere(self, what: str, value: str) -> None:
        """ValueError, on all ranks, if any rank's value differs from rank 0's."""
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
        """The group of all ranks, after checking that they hold the same model.

        ValueError, on all ranks, if their configs, formats or settings differ, and for a model on
        another GPU than this rank's. RuntimeError outside torchrun.
        """
        init()
        wait_for_all()  # some may still be reading their model
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
    def tensor_and_pipeline(cls, n_stages: int) -> "tuple[Group, Group]":
        """The ranks of this rank's stage, and the ranks in the same place of every stage.

        The ranks of a stage have consecutive numbers, so they share a machine if any ranks do.
        """
        R, rank = dist.get_world_size(), dist.get_rank()
        tp = R // n_stages
        in_stage = [list(range(stage * tp, (stage + 1) * tp)) for stage in range(n_stages)]
        across_stages = [list(range(place, R, tp)) for place in range(tp)]
        # Every rank must take part in making every group, also those it is not in.
        groups = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in in_stage + across_stages]
        return cls(groups[rank // tp]), cls(groups[n_stages + rank % tp])

    def note(self, name: str, sent: float) -> None:
        """Add the bytes that this rank sends in one call to the ledger."""
        self.sent[name] += round(sent)
