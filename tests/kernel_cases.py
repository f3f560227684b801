"""Sizes on which kernels are tested, in the interpreter and on a GPU."""

import itertools
from typing import Any

import pytest
import torch
from plain_attention import at_most_twice, check_gradients, double, formula
from torch import Tensor

from minillm.kernels import flash_backward, flash_decode, flash_forward

DTYPES = (torch.float32, torch.float16)
DIMS = (64, 128, 32, 16, 80, 256, 8)
HEADS = {"MHA": (2, 2), "GQA": (4, 2), "MQA": (3, 1)}
SAME = [(n, n) for n in (1, 31, 64, 113, 128, 203, 217, 256)]
MORE_KEYS = [(1, 113), (31, 256), (64, 203), (113, 203), (128, 217), (203, 256)]
FEWER_KEYS = [(256, 64), (113, 31), (31, 1)]  # not causal: the first queries would see nothing


def grid(
    lengths: list[tuple[int, int]],
    dims: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    *,
    halved: bool = False,
) -> list[Any]:
    """Every pair of lengths with every head dimension.

    Heads, dtypes and masks take turns, so that each head dimension meets each of their twelve
    combinations (with two dtypes). All combinations would be twelve times as many.
    halved: the lengths are half as large in float32, rounded up. Its tiles have at most 32 rows
    instead of 128, so there are still more of them than in float16.
    """
    turns = itertools.cycle(itertools.product(HEADS, dtypes, (True, False)))
    chosen = []
    for (T, S), D in itertools.product(lengths, dims):
        name, dtype, causal = next(turns)
        if halved and dtype == torch.float32:
            T, S = (T + 1) // 2, (S + 1) // 2
        causal = causal and T <= S
        mask = "causal" if causal else "full"
        case = f"{T}-{S}-{name}-{D}-{str(dtype)[6:]}-{mask}"
        chosen.append(pytest.param(T, S, *HEADS[name], D, dtype, causal, id=case))
    return chosen


def cases(chosen: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("T", "S", "H", "K", "D", "dtype", "causal"), chosen)


def far(shape: tuple[int, ...], strides: tuple[int, ...], memory: Tensor, offset: int) -> Tensor:
    """Normal numbers, far apart in `memory`."""
    view = memory.as_strided(shape, strides, offset)
    view.copy_(torch.randn(shape))
    return view


def check_far(memory: Tensor, which: str) -> None:
    """All kernels on tensors whose rows or sequences lie more than 2**31 numbers apart."""
    middle = 1 << 31
    if which == "rows":  # row 256 begins 2**31 numbers from the first
        (B, N), (stride_b, stride_n) = (1, 270), (1 << 15, 1 << 23)
    else:
        (B, N), (stride_b, stride_n) = (3, 40), (1 << 30, 512)
    q, k, v, grad = (
        far((B, N, 2, 16), (stride_b, stride_n, 16, 1), memory, middle + 64 * i) for i in range(4)
    )
    exact = formula(*double(q, k, v), True, 0.25)
    out, lse = flash_forward.flash_forward(q, k, v, True, 0.25)
    at_most_twice("output", out, formula(q, k, v, True, 0.25), exact)
    gradients = flash_backward.flash_backward(grad, q, k, v, out, lse, True, 0.25)
    check_gradients(gradients, q, k, v, grad, True, 0.25)
    few = flash_decode.flash_decode(q[:, -1:], k, v, True, 0.25)
    at_most_twice("decode", few, formula(q[:, -1:], k, v, True, 0.25), exact[:, -1:])
    q = far((B, 4, 2, 16), (16, 1 << 30, 64, 1), memory, middle)  # the decode kernel's rows
    few = flash_decode.flash_decode(q, k, v, True, 0.25)
    exact = formula(*double(q, k, v), True, 0.25)
    at_most_twice("decode", few, formula(q, k, v, True, 0.25), exact)
