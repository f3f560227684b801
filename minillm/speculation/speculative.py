"""Speculative decoding: several tokens from one pass of the model, and the same answer.

Sources: Leviathan et al. 2023, section 2 and algorithm 1; Chen et al. 2023, algorithm 2. Stern et
al. 2018 (blockwise parallel decoding) is the ancestor, for greedy decoding.
Cost: a round drafts k tokens, each c times a target pass, and verifies them in one pass over k + 1
tokens. If each guess is accepted with probability α, it yields (1 - α^(k+1)) / (1 - α) tokens, so
it is

    (1 - α^(k+1)) / ((1 - α) (c k + 1))        times as fast as decoding

where a pass over k + 1 tokens takes as long as one over a single token: where reading the weights
is what takes the time. `minillm.speculation.formulas.speedup` computes it.

The accept rule, for a guess x drawn from q where the target's distribution is p: keep it with
probability min(1, p(x) / q(x)); otherwise draw from the positive part of p - q instead, and stop.
Then what comes out is distributed as p, whatever q was (Leviathan et al., appendix A.1). After k
accepted guesses the pass has one more distribution to offer, and a bonus token is drawn from it.
Greedy decoding is the case in which p has one token.
Not here: trees of guesses.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.kv_cache import KVCache
from minillm.model import Decoder
from minillm.sampling import Sampling, check_sampling, draw, greedy, probabilities
from minillm.speculation.drafters import Draft, Drafter, check_drafter, common_prefix_length
from minillm.speculation.formulas import acceptance, accepts, speedup, tokens_per_pass
from minillm.tools.checks import check_request, check_token, check_whole

__all__ = [
    "SpeculativeResult", "acceptance", "accepted", "speculative_generate", "speedup",
    "tokens_per_pass", "verified",
]  # fmt: skip


@dataclass(frozen=True)
class SpeculativeResult:
    """The new tokens, and what they took.

    target_calls: passes of the target, the prompt's included. drafted: draft tokens that were
    verified; accepted: those of them that are in the answer.
    """

    tokens: list[int]
    target_calls: int
    drafted: int
    accepted: int


@torch.inference_mode()
def speculative_generate(
    target: Decoder,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    k: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int], None] | None = None,
    cache: KVCache | None = None,
) -> SpeculativeResult:
    """Continue a prompt as `generate` would, verifying k draft tokens of `drafter` at a time.

    Greedy tokens are those of `generate`, up to rounding: a pass over several tokens may sum in
    another order. Sampled ones have the same distribution, though not the same draws. A stop token
    is the last. on_token: called with each token as soon as it is certain. cache: one of the
    caller's for the target, with room for prompt and answer. Raises ValueError or TypeError for
    what `generate` refuses, k below 1, and a drafter that does not fit the target.
    """
    ids, stop = check_request(target.config, prompt_ids, max_new_tokens, stop_ids)
    check_sampling(sampling)
    check_whole("k", k)
    check_drafter(drafter)
    longest = len(ids) + max_new_tokens
    session = drafter.start(target, longest, sampling)
    if cache is None and max_new_tokens:
        cache = KVCache(target, 1, longest)
    stream = random.Random(None if sampling is None else sampling.seed)

    new: list[int] = []
    hidden: Tensor | None = None  # (C,), the hidden state that produced the newest token
    calls = drafted = kept = 0
    while len(new) < max_new_tokens and not (new and new[-1] in stop):
        # Draft: nothing beside the prompt, and the pass gives one token by itself.
        room = min(k, max_new_tokens - len(new) - 1) if new else 0
        uniforms = [stream.random() for _ in range(room)]
        draft = session.propose(ids, room, uniforms, hidden) if room else Draft()

        # Verify: one pass over what is not computed yet, the draft tokens with it.
        pending = ids[-1:] if new else ids
        fed = torch.tensor([[*pending, *draft.tokens]], device=target.device)  # (1, T)
        states = target.hidden(fed, cache)[0, len(pending) - 1 :]  # (n + 1, C)
        tokens = verified(draft, target.head(states), sampling, stream)

        # Accept: the cache keeps all but the newest token, which is not computed yet.
        n_kept, tokens = len(tokens) - 1, _up_to_stop(tokens, stop)
        calls, drafted = calls + 1, drafted + len(draft.tokens)
        kept += min(len(tokens), n_kept)
        hidden = states[len(tokens) - 1]
        cache.rewind(len(draft.tokens) + 1 - len(tokens))
        for token in tokens:
            ids.append(token)
            new.append(token)
            if on_token is not None:
                on_token(token)
    return SpeculativeResult(new, calls, drafted, kept)


def _up_to_stop(tokens: list[int], stop: frozenset[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: i + 1]
    return tokens


def verified(
    draft: Draft, logits: Tensor, sampling: Sampling | None, stream: random.Random
) -> list[int]:
    """The draft tokens that stand, and one token more.

    logits (n + 1, V): the target's, after the newest token and after each of the n draft tokens.
    ValueError for logits that are not numbers.
    """
    if sampling is not None and not sampling.greedy:
        tokens = accepted(draft, probabilities(logits, sampling), stream)
    else:
        best = greedy(logits).tolist()
        tokens = best[: common_prefix_length(draft.tokens, best) + 1]
    check_token(tokens[-1])
    return tokens


def accepted(draft: Draft, p: Tensor, stream: random.Random) -> list[int]:
    """The accept rule, with the target's distributions p (n + 1, V)."""
    for i, token in enumerate(draft.tokens):
        q = torch.zeros_like(p[i]) if draft.probs is None else draft.probs[i].to(p.device)
        if draft.probs is None:
            q[token] = 1.0  # a guess that nobody drew was certain
        if accepts(float(p[i, token]), float(q[token]), stream.random()):
            continue
        rest = (p[i] - q).clamp(min=0)
        rest = rest if float(rest.sum()) > 0 else p[i]  # p and q equal, up to rounding
        return draft.tokens[:i] + draw(rest[None], [stream.random()])
    return draft.tokens + draw(p[-1:], [stream.random()])
