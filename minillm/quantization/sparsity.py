"""2:4 sparsity: of every four neighbours in a row two are kept, and only those are stored.

Sources: Mishra et al. 2021 ("Accelerating Sparse Deep Neural Networks"), section 3, for the
pattern and its format; Sun et al. 2023 (Wanda), section 3, for the choice; Hassibi and Stork 1993
(optimal brain surgeon) for updating the kept weights.
Cost: a kept number takes its own bits and 2 for its place: 9/16 of the dense bytes with 16 bits,
5/8 with 8 bits. Least squares factorize a matrix for each row: out · in³ / 24 FLOPs.

    magnitude   keeps the two largest |w|
    wanda       keeps the two largest |w| · ‖x_j‖: what the weight adds to the outputs
    recover     then updates the kept weights of each row by least squares

It is the only sparse pattern that GPUs have an instruction for. CPUs have none: there each product
first makes the matrix dense, which saves memory but not time.
The head stays dense: no later layer can correct its errors, its rows compete with each other, and
an embedding tied to it looks up the same rows.
Not here: training afterwards; kernels of our own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from minillm.model import Decoder, Linear, check_plain, replace_linears
from minillm.quantization.calibration import Inputs, layer_by_layer
from minillm.quantization.gptq import damped
from minillm.quantization.grid import to_int8
from minillm.quantization.linear import CompactLinear
from minillm.tools.checks import brief

METHODS = ("magnitude", "wanda")
SOLVED_BYTES = 2**28
"""Memory for least squares: as many rows are solved at once as fit into it."""


def mask_2_4(scores: Tensor) -> Tensor:
    """scores (out, in) to bool (out, in): True for the two largest of every four neighbours.

    Of equal scores the first are kept. Raises ValueError if `in` is not a multiple of 4.
    """
    if scores.dim() != 2 or scores.shape[1] % 4:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; give a matrix whose rows have a multiple of "
            "4 numbers."
        )
    groups = rearrange(scores, "out (group four) -> out group four", four=4)
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return rearrange(mask, "out group four -> out (group four)")


@dataclass(frozen=True)
class Compressed:
    """A 2:4 sparse matrix (out, in) as `compress` makes it: the kept numbers and their places.

    values (out, in / 2): two for each group of four neighbours, in any dtype. indices (out, in / 8)
    in uint8: their places in the group, 0 to 3, in 2 bits each, the first in the lowest bits.
    """

    values: Tensor
    indices: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of values and places."""
        return self.values.nbytes + self.indices.nbytes

    def dense(self) -> Tensor:
        """The matrix (out, in) in the dtype of the values, with zeros where it was pruned."""
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=self.indices.device)
        places = self.indices[..., None] >> shifts & 3  # (out, in / 8, 4): four places in a byte
        places = rearrange(places, "out byte (half two) -> out (byte half) two", two=2)
        pairs = rearrange(self.values, "out (group two) -> out group two", two=2)
        groups = pairs.new_zeros(*pairs.shape[:2], 4)  # (out, in / 4, 4)
        groups.scatter_(2, places.long(), pairs)
        return rearrange(groups, "out group four -> out (group four)")


def compress(weight: Tensor, mask: Tensor) -> Compressed:
    """The numbers of weight (out, in) where mask (out, in) is True, and their places.

    Raises ValueError unless `in` is a multiple of 8, so that a row's places fill whole bytes, and
    the mask has exactly two of every four neighbours.
    """
    n_out, n_in = weight.shape
    if n_in % 8:
        raise ValueError(f"The matrix has {n_in} columns; 2:4 sparsity stores multiples of 8.")
    right = mask.dtype == torch.bool and mask.shape == weight.shape
    if not right or bool((mask.view(-1, 4).sum(1) != 2).any()):
        raise ValueError(f"mask is not 2:4 and bool {n_out, n_in}; make it with mask_2_4.")
    places = mask.view(-1, 4).nonzero()[:, 1].to(torch.uint8)  # row by row, two for each group
    a, b, c, d = rearrange(places, "(out byte four) -> four out byte", out=n_out, four=4)
    return Compressed(weight[mask].view(n_out, n_in // 2), a | b << 2 | c << 4 | d << 6)


def least_squares(weight: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """weight (out, in) in float32 with 0 where mask is False and the kept weights updated.

    mask (out, in) keeps equally many columns of each row. moments (in, in): M, the mean of x xᵀ.
    With k the kept columns of a row w and p the pruned ones, the outputs' error
    (w - ŵ) M (w - ŵ)ᵀ is least for

        ŵ_k = w_k + M_kk⁻¹ M_kp w_p        the kept columns take over the work of the pruned ones

    M is damped as in `gptq`, which pulls ŵ towards w. Even so the error is never larger than that
    of pruning alone.
    """
    w = weight.float()
    n_out, n_in = w.shape
    M = damped(moments)
    lost = (w * ~mask) @ M  # (out, in); its columns k are M_kp w_p
    columns = mask.nonzero()[:, 1].view(n_out, -1)  # k of each row, (out, in / 2)
    solved = torch.zeros_like(w)
    # Each row has its own M_kk: it and its factor take 2 · (in / 2)² numbers of 4 bytes.
    at_once = max(1, SOLVED_BYTES // (2 * n_in**2))
    for rows in torch.arange(n_out, device=w.device).split(at_once):
        k = columns[rows]
        factors = torch.linalg.cholesky(M[k[:, :, None], k[:, None, :]])  # (rows, in / 2, in / 2)
        more = torch.cholesky_solve(lost[rows].gather(1, k)[..., None], factors)[..., 0]
        solved[rows] = torch.zeros_like(w[rows]).scatter_(1, k, w[rows].gather(1, k) + more)
    return solved


class SparseLinear(CompactLinear):
    """x Wᵀ + bias for a compressed W (out, in). It stays on the device of W.

    scale (out,): multiplies the rows of W, if its values are whole numbers.
    On a CUDA device, 16-bit values are put into the order of torch.sparse, whose product reads them
    directly; that is untested, and its speed unknown. Elsewhere, and for other values, each product
    makes W dense and discards it.
    """

    stored = "2:4 sparse layers, dense head"

    def __init__(self, matrix: Compressed, scale: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = len(matrix.values), 2 * matrix.values.shape[1]
        self.sparse = None
        if torch_multiplies(matrix.values):
            self.sparse = torch.sparse.to_sparse_semi_structured(matrix.dense())
            # Its arrays become the buffers: they are counted, and nothing is stored twice.
            matrix = Compressed(self.sparse.packed, self.sparse.meta)
        self.register_buffer("values", matrix.values)
        self.register_buffer("indices", matrix.indices)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix (out, in) that the product uses."""
        if self.sparse is not None:
            return self.sparse.to_dense().to(dtype)
        matrix = Compressed(self.values, self.indices).dense()
        scaled = matrix if self.scale is None else matrix * self.scale.float()[:, None]
        return scaled.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in) to (…, out), in x's dtype."""
        if self.sparse is None:
            return F.linear(x, self.dense(x.dtype), self.bias)
        rows = x.reshape(-1, self.in_features)  # torch pads to the multiple it needs
        return F.linear(rows, self.sparse, self.bias).view(*x.shape[:-1], self.out_features)


def torch_multiplies(values: Tensor) -> bool:
    """Whether torch.sparse has a product for a compressed matrix with these values (out, in / 2).

    It does on a CUDA device, for 16 bits and for `out` and `in` that are multiples of 16.
    """
    n_out, half = values.shape
    sixteen_bits = values.dtype in (torch.float16, torch.bfloat16)
    fits = sixteen_bits and n_out % 16 == 0 and 2 * half % 16 == 0
    return fits and values.is_cuda and torch.backends.cusparselt.is_available()


def sparsify(
    model: Decoder,
    *,
    method: str = "magnitude",
    calibration: Tensor | Iterable[Tensor] | None = None,
    recover: bool = False,
    values: str | None = None,
    sequential: bool = True,
    progress: bool = False,
) -> Decoder:
    """A new model whose layers store half of each matrix; `model` is untouched.

    method: "magnitude" or "wanda". calibration: a batch of token ids, a tensor (B, T), or several;
    wanda and recover need it. recover: update the kept weights by least squares. values: "int8"
    stores them in 8 bits with a scale per row; otherwise they keep the model's dtype. Everything
    else is shared with `model`. sequential: each layer is calibrated on what the pruned layers
    before it give, as Wanda does; False leaves that out, in half the time: all layers see the
    inputs of the dense model. progress: show a bar while calibrating.
    Raises ValueError for an unknown method or kind of values, missing calibration, columns that are
    not a multiple of 8, numbers that are not finite, and matrices that are already sparse,
    quantized or replaced.
    """
    needs_inputs = method == "wanda" or recover
    _check_options(method, values, recover, needs_inputs and calibration is None)
    check_plain(model, "sparsify")
    _check_columns(model)

    def replacement(name: str, linear: Linear, inputs: Inputs | None = None) -> nn.Module:
        return linear if name == "head" else _pruned(linear, method, inputs, recover, values)

    if not needs_inputs:
        return replace_linears(model, replacement)
    small = replace_linears(model, lambda name, linear: linear)
    layer_by_layer(model, small, calibration, replacement, sequential=sequential, progress=progress)
    return small


def _check_options(method: str, values: str | None, recover: bool, lacks_calibration: bool) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {brief(method)}; choose one of {', '.join(METHODS)}.")
    if values not in (None, "int8"):
        raise ValueError(f"values is {brief(values)}; give 'int8', or None for the model's dtype.")
    if lacks_calibration:
        what = "recover=True" if recover else f"Method {method}"
        raise ValueError(f"{what} needs calibration: batches of token ids, tensors (B, T).")


def _check_columns(model: Decoder) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "head" and module.in_features % 8:
            raise ValueError(
                f"{name} has {module.in_features} columns; 2:4 sparsity stores multiples of 8, so "
                "take another model."
            )


@torch.no_grad()
def _pruned(
    linear: Linear, method: str, inputs: Inputs | None, recover: bool, values: str | None
) -> SparseLinear:
    """Score, mask, update and compress one matrix. inputs: its statistics, if they are needed."""
    weight = linear.weight.detach()
    scores = weight.float().abs()
    if method == "wanda":
        assert inputs is not None
        # Root mean square of each column of x: Wanda's ‖x_j‖, up to a factor that all share.
        scores *= inputs.moments.diagonal().clamp(min=0).sqrt()
    mask = mask_2_4(scores)
    kept = weight.float() * mask  # (out, in), half of it 0
    if recover:
        assert inputs is not None
        kept = least_squares(weight, mask, inputs.moments)
    bias = None if linear.bias is None else linear.bias.detach()
    if values is None:
        return SparseLinear(compress(kept.to(weight.dtype), mask), bias=bias)
    matrix = to_int8(kept)
    return SparseLinear(compress(matrix.q, mask), matrix.scale, bias)
