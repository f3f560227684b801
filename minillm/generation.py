"""Generation: prefill the prompt in one pass, then decode token by token. The loop, nothing else.

Source: Pope et al. 2022, section 2 (the two phases).
Cost: prefill `costs.prefill_flops(config, n)` once; then each token reads all weights and the cache
so far (`costs.decode_bytes`), which on most machines takes longer than the arithmetic.
Not here: several requests at once (the engine), draft tokens (speculative decoding).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from minillm.cache import Cache, NoCache
from minillm.kv_cache import KVCache
from minillm.layers.attention import check_backend
from minillm.model import Decoder
from minillm.sampling import (
    Sampling,
    TokenLogprobs,
    check_sampling,
    next_tokens,
    token_logprobs,
)
from minillm.tools.checks import check_request, check_token

_PIECE = 128  # tokens

Step = Callable[[list[int]], Tensor]
"""Tokens that follow those of the steps before, to the logits (V,) of the token after them."""


def prefill(model: Decoder, prompt_ids: Sequence[int], cache: Cache) -> Tensor:
    """Run the whole prompt through the model, filling the cache.

    Returns the logits (V,) of the token after it.
    """
    tokens = torch.tensor([prompt_ids], device=model.device)  # (1, T)
    # The head is needed at the last token only.
    return model.head(model.hidden(tokens, cache)[0, -1])


def decode(model: Decoder, token: int, cache: Cache) -> Tensor:
    """Run one token, attending to everything cached; returns the logits (V,) of the next."""
    # The same computation on a prompt of one: that is what a cache buys.
    return prefill(model, [token], cache)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    use_cache: bool = True,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int], None] | None = None,
    cache: Cache | None = None,
    backend: str = "auto",
    step: Step | None = None,
) -> list[int]:
    """Continue a prompt by up to `max_new_tokens` tokens.

    Returns the new ones, a stop token included as the last. sampling: None is greedy. on_token:
    called with each id as soon as it is known. use_cache=False recomputes everything for every
    token: the same ids, slower. cache: one of the caller's, with room for prompt and answer.
    backend: see `minillm.attention`. step: another way to the logits, such as `graphed_step` of
    `minillm.serving.cuda_graphs`. ValueError for an empty or too long prompt, and for unknown ids.
    """
    ids, stop = check_request(model.config, prompt_ids, max_new_tokens, stop_ids)
    check_sampling(sampling)
    check_backend(backend)
    if step is None:
        room = len(ids) + max_new_tokens
        step = _step(model, room, cache, backend) if use_cache else _without_cache(model, backend)
    stream = (sampling or Sampling()).stream()

    new: list[int] = []
    tokens = ids  # the whole prompt first, then one token at a time
    for _ in range(max_new_tokens):
        logits = step(tokens)  # (V,)
        (token,) = tokens = next_tokens(logits[None], [sampling], [stream.random()])
        new.append(check_token(token))
        if on_token is not None:
            on_token(token)
        if token in stop:
            break
    return new


@torch.inference_mode()
def prompt_logprobs(
    model: Decoder, prompt_ids: Sequence[int], n_top: int = 0, *, backend: str = "auto"
) -> list[TokenLogprobs]:
    """How likely each token of a prompt but the first is, given those before it.

    With the n_top likeliest tokens of each place. One pass over the prompt, without a cache.
    """
    ids, _ = check_request(model.config, prompt_ids, 0, ())
    hidden = model.hidden(torch.tensor([ids], device=model.device), NoCache(backend))[0, :-1]
    # The head by pieces: the logits of a long prompt, (T, V), would take gigabytes.
    pieces = zip(hidden.split(_PIECE), range(1, len(ids), _PIECE), strict=False)
    return [
        row
        for piece, at in pieces
        for row in token_logprobs(model.head(piece), ids[at : at + len(piece)], n_top)
    ]


def _step(model: Decoder, room: int, cache: Cache | None, backend: str) -> Step:
    """Only the new tokens are computed; of all others the cache has the keys and values."""
    cache = KVCache(model, 1, room, backend=backend) if cache is None else cache
    return lambda tokens: prefill(model, tokens, cache)


def _without_cache(model: Decoder, backend: str) -> Step:
    """All tokens so far are computed again."""
    so_far: list[int] = []

    def step(tokens: list[int]) -> Tensor:
        so_far.extend(tokens)
        return prefill(model, so_far, NoCache(backend))

    return step
