"""The grid: real numbers as whole numbers with a scale, and two 4-bit numbers in a byte.

Sources: Dettmers et al. 2022 (LLM.int8()), section 2 (absmax and zero-point quantization); the
block formats Q4_0 and Q4_1 of ggml.
Cost: int8 stores one scale per row. int4 stores a scale and a zero per group of numbers in a row:
with groups of 32, 32 bits on top of 128, so 5 bits a number.

    int8   w ≈ scale · q                    q from -127 to 127, one scale per row
    int4   w ≈ scale · (q - 8) + zero       q from 0 to 15, scale and zero per group

Scales and zeros are rounded to bfloat16 before q is chosen, because the products read them in
bfloat16: q is then the best for the scale that is used, and only one rounding error remains.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix: q (out, in) in int8 or float8, or in uint8 for int4.

    scale (out,) for 8 bits. For int4 scale and zero are (out, in / group_size); zero is None for
    8 bits.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def group_size(self) -> int:
        """How many numbers of a row share a scale."""
        return self.q.shape[1] // (self.scale.shape[1] if self.zero is not None else 1)

    def dequantized(self) -> Tensor:
        """The numbers that q stands for, (out, in) in float32."""
        if self.zero is None:
            return self.q.float() * self.scale.float()[:, None]
        grouped = self.q.float().unflatten(1, (-1, self.group_size)) - 8  # (out, groups, size)
        return (grouped * self.scale.float()[..., None] + self.zero.float()[..., None]).flatten(1)


def to_int8(weight: Tensor) -> QuantizedMatrix:
    """weight (out, in) with one symmetric scale per row: the largest magnitude becomes 127."""
    w = weight.float()
    scale = _rounded(w.abs().amax(1) / 127)
    q = (w / divisor(scale)[:, None]).round().clamp(-127, 127)
    return QuantizedMatrix(q.to(torch.int8), scale)


def to_float8(weight: Tensor) -> QuantizedMatrix:
    """weight (out, in) with one scale per row: the largest magnitude becomes 448, e4m3's largest.

    Source: Micikevicius et al. 2022 (FP8 formats for deep learning), section 3.
    """
    w = weight.float()
    scale = _rounded(w.abs().amax(1) / 448)
    q = (w / divisor(scale)[:, None]).clamp(-448, 448)
    return QuantizedMatrix(q.to(torch.float8_e4m3fn), scale)


def to_int4(
    weight: Tensor, group_size: int, *, symmetric: bool = False, bits: int = 4
) -> QuantizedMatrix:
    """weight (out, in) in groups: 16 steps from the least number to the largest.

    symmetric: 15 steps around 0, from -7 to 7, instead. bits: 3 or 2 use only 8 or 4 of the steps
    (7 or 3 if symmetric); they are stored in 4 bits all the same.
    """
    w = weight.float().unflatten(1, (-1, group_size))  # (out, groups, group_size)
    scale, zero, least, most = int4_steps(w, symmetric=symmetric, bits=bits)
    q = ((w - zero.float()[..., None]) / divisor(scale)[..., None]).round() + 8
    return QuantizedMatrix(q.clamp(least, most).flatten(1).to(torch.uint8), scale, zero)


def int4_steps(w: Tensor, *, symmetric: bool, bits: int) -> tuple[Tensor, Tensor, int, int]:
    """For groups w (…, group_size): scale and zero (…) in bfloat16, the least and the largest q."""
    if symmetric:
        steps = 2 ** (bits - 1) - 1
        scale = _rounded(w.abs().amax(-1) / steps)
        return scale, torch.zeros_like(scale), 8 - steps, 8 + steps
    low, high = w.amin(-1), w.amax(-1)
    scale = _rounded((high - low) / (2**bits - 1))
    return scale, _rounded(low + 8 * scale.float()), 0, 2**bits - 1  # q = 0 stands for `low`


def pack(q: Tensor) -> Tensor:
    """4-bit numbers (…, n) as bytes (…, n / 2), for an even n.

    Number 2j is the low half of byte j, number 2j + 1 the high half.
    """
    return q[..., ::2] | q[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: bytes (…, n / 2) to numbers (…, n) from 0 to 15."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_blocks(q: Tensor) -> Tensor:
    """4-bit numbers (…, n) as bytes (…, n / 2) in blocks of 32, the order of ggml's Q4_0 and Q4_1.

    Of each 32 numbers, number j is the low half of byte j, number j + 16 its high half; 32 must
    divide n. So the low halves of neighbours are neighbours, which suits the product on a GPU.
    """
    low, high = q.unflatten(-1, (-1, 2, 16)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_blocks(packed: Tensor) -> Tensor:
    """The inverse of `pack_blocks`: bytes (…, n / 2) to numbers (…, n) from 0 to 15."""
    blocks = packed.unflatten(-1, (-1, 16))
    return torch.cat((blocks & 15, blocks >> 4), -1).flatten(-2)


def _rounded(scale: Tensor) -> Tensor:
    return scale.to(torch.bfloat16)


def divisor(scale: Tensor) -> Tensor:
    """The scale in float32, or 1 where it is 0: there all numbers are equal."""
    scale = scale.float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))
