"""Matrix products that PyTorch has for CPUs but gives no public name, and what this CPU supports.

Every private function of PyTorch that the package calls stands here, once. A new version may rename
or change any of them; `tests/test_cpu_products.py` then says which one, in a sentence.

    onednn_layout, onednn_linear                a matrix copied into oneDNN's own layout
    bfloat16_linear                             bfloat16 times bfloat16, also without instructions
    int8_weight_linear                          bfloat16 times int8 weights
    int4_layout, int4_weight_linear             bfloat16 times int4 weights
    int8_matmul                                 int8 times int8; on a GPU as well

Not here: checks. Each function needs what its docstring says, and some crash without it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 here: with AVX-512 on an x86 CPU."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_int8() -> bool:
    """Whether the CPU has instructions for products of int8 (VNNI)."""
    return torch.cpu._is_vnni_supported()


def has_amx() -> bool:
    """Whether the CPU has matrix units (AMX: Intel's since 2023)."""
    return torch.cpu._is_amx_tile_supported()


def has_avx2_only() -> bool:
    """Whether this is an x86 CPU with AVX2 but without AVX-512."""
    return torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_supported()


def onednn_layout(weight: Tensor, n_rows: int) -> Tensor:
    """A copy of weight (out, in) in the layout that oneDNN prefers for inputs of n_rows rows.

    float32 or bfloat16. Only `onednn_linear` can read the copy. Needs oneDNN.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, n_rows)


def onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, in) times a matrix from `onednn_layout`, plus bias: (…, out). No gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def bfloat16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, in) times weight (out, in), in bfloat16: (rows, out). weight: in any dtype.

    A CPU without `has_bfloat16` multiplies number by number, many times slower than in float32.
    There the factors are converted, exactly, and the sums are rounded at the end.
    """
    if x.device.type == "cpu" and not has_bfloat16():
        return F.linear(x.float(), weight.float()).bfloat16()
    return F.linear(x, weight.to(x.dtype))


def int8_weight_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (rows, in) times int8 weight (out, in), times scale (out,): (rows, out).

    x and scale in bfloat16: float32 falls back to a loop a hundred times slower. `in` must be a
    multiple of 16, and x and weight must start at multiples of 64 bytes, or the process crashes.
    """
    return torch._weight_int8pack_mm(x, weight, scale)


def int4_layout(q: Tensor) -> Tensor:
    """q (out, in) from 0 to 15 as packed bytes (out, in / 2), in an order that depends on the CPU.

    `out` must be a multiple of 16.
    """
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)


def int4_weight_linear(x: Tensor, packed: Tensor, group_size: int, scale_zero: Tensor) -> Tensor:
    """x (rows, in) times a matrix from `int4_layout`: (rows, out).

    A number q stands for scale · (q - 8) + zero. scale_zero (in / group_size, out, 2). x and
    scale_zero in bfloat16: float32 falls back to a loop a hundred times slower.
    """
    return torch._weight_int4pack_mm_for_cpu(x, packed, group_size, scale_zero)


def int8_matmul(q: Tensor, weight: Tensor) -> Tensor:
    """q (rows, in) times weight (out, in), both int8: (rows, out) in int32.

    On a GPU it needs more than 16 rows. A CPU without `has_int8` multiplies number by number.
    """
    return torch._int_mm(q, weight.T)
