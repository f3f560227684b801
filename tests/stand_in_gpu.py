"""A stand-in for a GPU: PyTorch's device "meta", whose tensors have shapes and no numbers.

Code for a GPU runs on it to the end and can be watched: whatever needs a number from the device
fails, whatever is copied to it from the host is noted, and kernels are noted instead of launched.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from gpu_compiler import Launch, recorded
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm import ragged
from minillm.kernels import flash_backward, flash_decode, flash_forward, fused, paged_attention
from minillm.layers import fast, flash

KERNELS = (flash_forward, flash_backward, flash_decode, paged_attention, fused)


class _Mixed(TorchDispatchMode):
    """Notes the operations that have to do with more than one device."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors if x.dim() or x.device.type != "cpu"}) > 1:
            self.seen.append(str(func))
        return out


class _Made(TorchFunctionMode):
    """Notes the tensors that are made from numbers in Python, which "meta" does not copy."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.frombuffer, torch.from_numpy):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def transfers() -> Iterator[list[str]]:
    """What brings numbers from the host inside the block: a captured CUDA graph can hold none."""
    seen: list[str] = []
    with _Mixed(seen), _Made(seen):
        yield seen


class Guards:
    """Stands in for `on_device_of`: inside how many of them we are."""

    def __init__(self) -> None:
        self.depth = 0

    @contextmanager
    def __call__(self, x: torch.Tensor) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1


@contextmanager
def stand_in_gpu() -> Iterator[list[Launch]]:
    """Inside the block the kernels take tensors on "meta"; their launches are noted, in order.

    Each must come while the tensors' device is made the current one.
    """
    guards, launches = Guards(), []

    class Noted(list[Launch]):
        def append(self, launch: Launch) -> None:
            assert guards.depth, f"{launch.kernel.fn.__name__}: launched on the current device"
            launches.append(launch)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for module in (flash, ragged, fast):
            patch.setattr(module, "on_device_of", guards)
        for module in (import_module("minillm.layers.attention"), ragged):
            patch.setattr(module, "why_not_triton", lambda q, scale: None)
        patch.setattr(fast, "why_not_here", lambda x, what, instead: None)
        for module in KERNELS:
            stack.enter_context(recorded(module, Noted()))
        yield launches
