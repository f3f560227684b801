"""The online softmax: a row of softmax(scores) V, while the tiles of keys come one after another.

Source: Milakov and Gimelshein 2018. For each of its rows a program keeps

    m      the largest score so far
    total  Σ exp(score - m) so far, called l in the FlashAttention papers
    acc    Σ exp(score - m) · v so far

When a new tile of keys brings a larger maximum m', the sums so far are relative to the wrong
maximum: exp(score - m') = exp(score - m) · exp(m - m'). So total and acc are multiplied by
exp(m - m'), called rescale here, and the tile's own terms are added. After the last tile
O = acc / total, and the log-sum-exp of the row is m + log total.

GPUs have an instruction for 2^x and none for e^x. So m counts in powers of two, and the scores are
multiplied by scale · log2(e) once, inside the subtraction (one fused multiply-add). This needs
scale > 0, because the maximum is taken before.

MAY_SEE_NOTHING: a row may have seen no key yet. Its m is -inf, and -inf - -inf must not become
NaN: such a row ends with output 0 and log-sum-exp -inf.
"""

import math

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2))


@triton.jit
def no_keys_yet(BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """acc (BLOCK_R, BLOCK_D), m and total (BLOCK_R,), before the first tile of keys."""
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    return acc, m, tl.zeros([BLOCK_R], tl.float32)


@triton.jit
def softmax_step(scores, m, total, scale_log2, MAY_SEE_NOTHING: tl.constexpr):
    """(weights, rescale, m, total) after the tile with these scores (BLOCK_R, BLOCK_S).

    The caller loads the tile's values and adds them: acc = acc · rescale + weights @ v_tile.
    """
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    shift = m_new
    if MAY_SEE_NOTHING:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    rescale = tl.exp2(m - shift)
    return weights, rescale, m_new, total * rescale + tl.sum(weights, 1)


@triton.jit
def output_and_lse(acc, m, total, MAY_SEE_NOTHING: tl.constexpr):
    """The rows' output (BLOCK_R, BLOCK_D) and log-sum-exp (BLOCK_R,), after the last tile."""
    if MAY_SEE_NOTHING:
        total = tl.where(m == float("-inf"), 1.0, total)
    return acc / total[:, None], (m + tl.log2(total)) * LN_2
