"""Run by torchrun: the checks of one process against several ranks, of as many files as are named.

torchrun --nproc-per-node 3 tests/ranks.py ranks_tensor ranks_pipeline
torchrun --nproc-per-node 3 tests/ranks.py ranks_tensor:check_memory
"""

import gc
import importlib
import sys
from pathlib import Path

import torch

from minillm.parallel.collectives import shutdown, world_size


def check_leaving() -> None:
    """No thread listens after it: one that still lets go of a tensor as Python ends aborts it."""
    gc.collect()
    shutdown()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "gloo" in name], names  # without /proc there are none


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function or "check_all")(world_size())
        print(f"{name}: all checks passed")
    if "ranks_pytorch" not in "".join(sys.argv):  # DTensor keeps its groups to the end
        check_leaving()
