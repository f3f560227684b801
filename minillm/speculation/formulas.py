"""What speculation should gain, and its accept rule for one guess, in plain numbers. No tensors.

Sources: Leviathan et al. 2023, section 3 and appendix A.1.
"""

import random
from collections.abc import Sequence


def tokens_per_pass(alpha: float, k: int) -> float:
    """(1 - α^(k+1)) / (1 - α): what a round of k guesses yields (Leviathan et al. 2023, eq. 1)."""
    return k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def acceptance(per_pass: float, k: int) -> float:
    """The α at which rounds of k guesses yield so many tokens each: `tokens_per_pass` backwards."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(middle, k) < per_pass else (low, middle)
    return high


def speedup(alpha: float, k: int, c: float, v: float = 1.0) -> float:
    """(1 - α^(k+1)) / ((1 - α)(c k + v)) (Leviathan et al. 2023, theorem 3.8, where v is 1).

    alpha: the chance that a guess is accepted, if those before it were; c: a draft pass over a
    target pass of one token; v: a target pass of k + 1 tokens over one of one token.
    """
    return tokens_per_pass(alpha, k) / (c * k + v)


def overlap(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ min(p, q): how often a guess drawn from q is accepted where the target's is p (eq. 5)."""
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def accepts(p: float, q: float, uniform: float) -> bool:
    """Whether a guess stands: with probability min(1, p / q), for a uniform number in [0, 1).

    p, q: the guess's probability under the target and under the drafter.
    """
    return uniform * q < p


def residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """The positive part of p - q, not normalized: what a rejected guess is replaced from.

    p itself where nothing is left: p and q are equal, up to rounding.
    """
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return rest if sum(rest) > 0 else list(p)


def draw_one(
    p: Sequence[float], q: Sequence[float], stream: random.Random
) -> tuple[int, int, bool]:
    """(the guess, the token that comes out, whether the guess stood), for one guess drawn from q.

    The token is distributed as p, whatever q is.
    """
    (guess,) = stream.choices(range(len(q)), q)
    if accepts(p[guess], q[guess], stream.random()):
        return guess, guess, True
    (token,) = stream.choices(range(len(p)), residual(p, q))
    return guess, token, False
