"""Attention: softmax(Q Kᵀ / sqrt(D)) V, with any number of query heads per key/value head.

Multi-head, grouped-query and multi-query attention are one case.
Sources: Vaswani et al. 2017, section 3.2.1; Shazeer 2019 (one key/value head); Ainslie et al. 2023
(groups).
Cost: 4 * H * D FLOPs for each (query, key) pair. The reference also writes and reads B * H * T * S
scores; the other backends don't (`costs.attention_bytes`).
Layout (that of the flash-attn library): q is (B, T, H, D), k and v are (B, S, K, D), H a multiple
of K: query head h reads key/value head h // (H/K). Causal masks align the *last* query with the
last key, so the T queries are the newest of S tokens. No backend copies shared heads in memory.
Not here: dropout, sliding windows, learned biases, padding masks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.availability import why_not_triton
from minillm.layers.flash import FlashAttention, triton_attention

BACKENDS = ("auto", "reference", "tiled", "triton", "sdpa")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend with queries (B, T, H, D) to keys and values (B, S, K, D); returns (B, T, H, D).

    scale: multiplies the scores, 1/sqrt(D) unless given. causal: query t sees keys 0 … S - T + t.
    backend: "reference" writes out the matrix of scores; "tiled" is FlashAttention in plain torch,
    to read; "triton" is FlashAttention in our own kernels, for CUDA devices; "sdpa" is PyTorch's
    fused kernel; "auto" is "triton" on CUDA where the kernels take the input, "sdpa" elsewhere.
    Raises ValueError or TypeError if the shapes, dtypes or devices don't fit together or the
    backend can't take them.
    """
    check_inputs(q, k, v, causal, backend)
    scale = default_scale(q) if scale is None else scale
    return unchecked_attention(q, k, v, causal, scale, backend)


def default_scale(q: Tensor) -> float:
    """1/sqrt(D), for q (…, D): keeps the variance of the scores near 1 (Vaswani et al. 2017)."""
    return q.shape[-1] ** -0.5


def unchecked_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, backend: str
) -> Tensor:
    """`attention` without the checks of shapes, which take time in a decode step.

    For caches, which know their shapes. All arguments as there; scale is a number.
    """
    if backend == "auto":
        backend = "triton" if q.is_cuda and why_not_triton(q, scale) is None else "sdpa"
    elif backend == "triton" and (reason := why_not_triton(q, scale)):
        raise ValueError(reason)
    if backend == "sdpa":
        return _sdpa(q, k, v, causal, scale)
    if backend == "triton":
        return triton_attention(q, k, v, causal, scale)
    if backend == "tiled":
        return FlashAttention.apply(q, k, v, causal, scale, "tiled")
    return reference_attention(q, k, v, causal, scale)


def check_backend(backend: str, known: tuple[str, ...] = BACKENDS) -> None:
    """Raise ValueError for a name that is not one of the known ones."""
    if backend not in known:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(known)}.")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: str) -> None:
    """Raise ValueError or TypeError for inputs that attention would compute wrongly."""
    check_backend(backend)
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; "
            "expected (B, T, H, D), (B, S, K, D), (B, S, K, D)."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch size or head dimension."
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(
            f"q {tuple(q.shape)} or k {tuple(k.shape)} is empty; every size must be 1 or more."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads."
        )
    if causal and q.shape[1] > k.shape[1]:
        raise ValueError(
            f"causal attention of {q.shape[1]} queries to {k.shape[1]} keys: the first queries "
            "would see no key; give S >= T."
        )
    if not q.is_floating_point() or q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; all three must be the same "
            "floating-point dtype."
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(
            f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device."
        )


def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """(T, S) booleans, True where query t may look at key s: s <= S - T + t."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """The definition, to read and to test against: all scores in memory, softmax in float32."""
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    q = q.reshape(B, T, K, H // K, D)  # (B, T, K, G, D): G query heads share a key/value head
    scores = torch.einsum("btkgd,bskd->bkgts", q, k).float() * scale  # (B, K, G, T, S)
    if causal:
        scores = scores.masked_fill(~causal_mask(T, S, q.device), -torch.inf)
    weights = scores.softmax(dim=-1).to(q.dtype)  # over the keys
    return torch.einsum("bkgts,bskd->btkgd", weights, v).reshape(B, T, H, D)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """PyTorch's scaled_dot_product_attention, whose heads come before tokens: (B, H, T, D)."""
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, K, S, D), views
    if T == 1:
        # Decode. The newest token sees every key, so there is no mask. The G query heads that share
        # a key/value head are the G rows of one small matrix, so nothing is expanded.
        rows = q.reshape(B, K, H // K, D)  # (B, K, G, D)
        out = F.scaled_dot_product_attention(rows, k, v, scale=scale)
        return out.reshape(B, 1, H, D)
    # PyTorch scales the -inf of its own mask as well: NaN unless the scale is positive. That mask
    # aligns the first query with the first key, so S must be T.
    own_mask = causal and S == T and scale > 0
    mask = causal_mask(T, S, q.device) if causal and not own_mask else None
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=own_mask, scale=scale, enable_gqa=H != K
    )
    return out.transpose(1, 2)
