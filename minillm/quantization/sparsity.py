"""2:4 sparsity: of every four neighbours in a row, two are kept, and only those are stored.

Sources: Mishra et al. 2021 ("Accelerating Sparse Deep Neural Networks"), section 3, for the
pattern and its format; Sun et al. 2023 (Wanda), section 3, for the choice; Hassibi and Stork 1993
(optimal brain surgeon) for the weights that make up for the pruned ones.
Cost: a kept number takes its own bits and 2 for its place. With 16 bits that is 9/16 of the dense
bytes, with 8 bits 5/8. Least squares factorize a matrix for each row: N · K³ / 24 FLOPs.

    magnitude   keeps the two largest |w|
    wanda       keeps the two largest |w| · ‖x_j‖: what the weight adds to the outputs
    recover     afterwards the kept weights of each row are solved again, by least squares

It is the one sparse pattern that GPUs have an instruction for. A CPU has none: there the matrix is
made dense at each product, which saves memory and not time.
The head stays dense: no later layer makes up for its errors, each of its rows competes with all
others, and an embedding tied to it is looked up from the same rows.
Not here: each layer calibrated on what the pruned layers before it put out, as Wanda does it (here
all see the inputs of the dense model); training afterwards; kernels of our own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import Decoder, Linear, check_plain, replace_linears
from minillm.quantization.calibration import Inputs, collect
from minillm.quantization.gptq import damped
from minillm.quantization.grid import to_int8
from minillm.tools.checks import brief

METHODS = ("magnitude", "wanda")
SOLVED_BYTES = 2**28
"""Least squares solve as many rows at once as fit into this."""


def mask_2_4(scores: Tensor) -> Tensor:
    """scores (N, K) to bool (N, K): True for the two largest of every four neighbours in a row.

    Of equal scores the first are kept. Raises ValueError if K is not a multiple of 4.
    """
    if scores.dim() != 2 or scores.shape[1] % 4:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; give a matrix (N, K), K a multiple of 4."
        )
    groups = scores.unflatten(1, (-1, 4))  # (N, K / 4, 4)
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(-1, order[..., :2], True).flatten(1)


@dataclass(frozen=True)
class Compressed:
    """A 2:4 sparse matrix (N, K): the kept numbers and their places, made by `compress`.

    values (N, K / 2): two for each group of four neighbours, in any dtype. indices (N, K / 8)
    uint8: the places 0 to 3 within their groups in 2 bits each, four a byte, the first one lowest.
    """

    values: Tensor
    indices: Tensor

    @property
    def nbytes(self) -> int:
        """Of values and places."""
        return self.values.nbytes + self.indices.nbytes

    def dense(self) -> Tensor:
        """The matrix (N, K) in the dtype of the values, with zeros where it was pruned."""
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=self.indices.device)
        places = (self.indices[..., None] >> shifts & 3).flatten(1)  # (N, K / 2)
        pairs, places = (x.unflatten(1, (-1, 2)) for x in (self.values, places.long()))
        groups = pairs.new_zeros(*pairs.shape[:2], 4)  # (N, K / 4, 4)
        return groups.scatter_(2, places, pairs).flatten(1)


def compress(weight: Tensor, mask: Tensor) -> Compressed:
    """The numbers of weight (N, K) where mask (N, K) is True, and their places.

    Raises ValueError unless K is a multiple of 8, so that a row's places fill whole bytes, and the
    mask has two of every four neighbours.
    """
    N, K = weight.shape
    if K % 8:
        raise ValueError(f"The matrix has {K} columns; 2:4 sparsity stores multiples of 8.")
    right = mask.dtype == torch.bool and mask.shape == weight.shape
    if not right or bool((mask.view(-1, 4).sum(1) != 2).any()):
        raise ValueError(f"mask is not 2:4 and bool {N, K}; make it with mask_2_4.")
    places = mask.view(-1, 4).nonzero()[:, 1].to(torch.uint8).view(N, K // 2)
    a, b, c, d = (places[:, i::4] for i in range(4))
    return Compressed(weight[mask].view(N, K // 2), a | b << 2 | c << 4 | d << 6)


def least_squares(weight: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """weight (N, K) in float32, 0 where mask is False, and the rest solved again.

    mask (N, K) has equally many columns in each row. moments (K, K): M, the mean of x xᵀ. With S
    the kept columns of a row w and P the pruned ones, the outputs' error (w - ŵ) M (w - ŵ)ᵀ is
    least for

        ŵ_S = w_S + M_SS⁻¹ M_SP w_P        the kept columns take over what the pruned ones did

    M is damped as in `minillm.gptq`, which pulls ŵ towards w. Even so the error is never larger
    than that of pruning alone, whose ŵ_S is as close to w_S as can be.
    """
    w = weight.float()
    N, K = w.shape
    M = damped(moments)
    lost = (w * ~mask) @ M  # (N, K), of which S is M_SP w_P
    columns = mask.nonzero()[:, 1].view(N, -1)  # S of each row, (N, K / 2)
    solved = torch.zeros_like(w)
    # A row's M_SS and its factor together have 2 · (K / 2)² numbers of 4 bytes.
    for rows in torch.arange(N, device=w.device).split(max(1, SOLVED_BYTES // (2 * K * K))):
        S = columns[rows]
        factors = torch.linalg.cholesky(M[S[:, :, None], S[:, None, :]])
        more = torch.cholesky_solve(lost[rows].gather(1, S)[..., None], factors)[..., 0]
        solved[rows] = torch.zeros_like(w[rows]).scatter_(1, S, w[rows].gather(1, S) + more)
    return solved


class SparseLinear(nn.Module):
    """x Wᵀ + bias for W (N, K) in its compressed form. Made for the device that the form is on.

    scale (N,): what each row is multiplied with, if the values are whole numbers.
    On a CUDA device, values of 16 bits are put into the order of torch.sparse, whose product then
    takes them as they are; that is untested, and nothing is said about its speed. Elsewhere, and
    with other values, each product makes W dense and forgets it.
    """

    stored = "2:4 sparse layers, dense head"

    def __init__(self, matrix: Compressed, scale: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = len(matrix.values), 2 * matrix.values.shape[1]
        self.sparse = None
        if torch_multiplies(matrix.values):
            self.sparse = torch.sparse.to_sparse_semi_structured(matrix.dense())
            # Its arrays are the buffers, so that they count, and nothing is stored twice.
            matrix = Compressed(self.sparse.packed, self.sparse.meta)
        self.register_buffer("values", matrix.values)
        self.register_buffer("indices", matrix.indices)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix (N, K) that is computed with."""
        if self.sparse is not None:
            return self.sparse.to_dense().to(dtype)
        matrix = Compressed(self.values, self.indices).dense()
        scaled = matrix if self.scale is None else matrix * self.scale.float()[:, None]
        return scaled.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, K) to (…, N), in x's dtype."""
        if self.sparse is None:
            return F.linear(x, self.dense(x.dtype), self.bias)
        rows = x.reshape(-1, self.in_features)  # torch pads them to the multiple that it needs
        return F.linear(rows, self.sparse, self.bias).view(*x.shape[:-1], self.out_features)


def torch_multiplies(values: Tensor) -> bool:
    """Whether torch.sparse has a product for a compressed matrix with these values (N, K / 2).

    On a CUDA device, in 16 bits, for N and K that are multiples of 16.
    """
    N, half = values.shape
    sixteen_bits = values.dtype in (torch.float16, torch.bfloat16)
    fits = sixteen_bits and N % 16 == 0 and 2 * half % 16 == 0
    return fits and values.is_cuda and torch.backends.cusparselt.is_available()


def sparsify(
    model: Decoder,
    *,
    method: str = "magnitude",
    calibration: Tensor | Iterable[Tensor] | None = None,
    recover: bool = False,
    values: str | None = None,
) -> Decoder:
    """A new model whose layers store half of each matrix; `model` is untouched.

    method: "magnitude" or "wanda". calibration: a batch of token ids, a tensor (B, T), or several;
    wanda and recover need it. recover: solve the kept weights again. values: "int8" stores them in
    8 bits with a scale for each row; otherwise they keep the model's dtype. All else is shared.
    Raises ValueError for an unknown method or kind of values, missing calibration, columns that are
    not a multiple of 8, numbers that are not finite, and matrices that are sparse, quantized or
    replaced already.
    """
    if method not in METHODS:
        raise ValueError(f"method is {brief(method)}; choose one of {', '.join(METHODS)}.")
    if values not in (None, "int8"):
        raise ValueError(f"values is {brief(values)}; give 'int8', or None for the model's dtype.")
    looks = method == "wanda" or recover
    if looks and calibration is None:
        what = "recover=True" if recover else f"Method {method}"
        raise ValueError(f"{what} needs calibration: batches of token ids, tensors (B, T).")
    check_plain(model, "sparsify")
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "head" and module.in_features % 8:
            raise ValueError(
                f"{name} has {module.in_features} columns; 2:4 sparsity stores multiples of 8, so "
                "take another model."
            )
    inputs = collect(model, calibration) if looks else {}

    def replacement(name: str, linear: Linear) -> nn.Module:
        if name == "head":
            return linear
        return _pruned(linear, method, inputs.get(name), recover, values)

    return replace_linears(model, replacement)


@torch.no_grad()
def _pruned(
    linear: Linear, method: str, inputs: Inputs | None, recover: bool, values: str | None
) -> SparseLinear:
    weight = linear.weight.detach()
    scores = weight.float().abs()
    if method == "wanda":
        assert inputs is not None
        # The root of the mean square of each column, which is ‖x_j‖ but for a factor.
        scores *= inputs.moments.diagonal().clamp(min=0).sqrt()
    mask = mask_2_4(scores)
    kept = weight.float() * mask
    if recover:
        assert inputs is not None
        kept = least_squares(weight, mask, inputs.moments)
    bias = None if linear.bias is None else linear.bias.detach()
    if values is None:
        return SparseLinear(compress(kept.to(weight.dtype), mask), bias=bias)
    grid = to_int8(kept)
    return SparseLinear(compress(grid.q, mask), grid.scale, bias)
