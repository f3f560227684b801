"""Generation: prefill the prompt in one pass, then decode token by token. The loop, nothing else.

Source: Pope et al. 2022, section 2 (the two phases).
Cost: prefill `costs.prefill_flops(config, n)` once; then each token reads all weights and the cache so far
(`costs.decode_bytes`), which on most machines takes longer than the arithmetic.
Not here: several requests at once (the engine), drafts (speculative decoding).
"""

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from minillm.kv_cache import Cache, KVCache, NoCache
from minillm.model import Decoder
from minillm.sampling import Sampling, sample


def prefill(model: Decoder, prompt_ids: Sequence[int], cache: Cache) -> Tensor:
    """Run the whole prompt through the model, filling the cache; returns the logits (V,) of the token after it."""
    tokens = torch.tensor([prompt_ids], device=model.device)  # (1, T)
    return model.head(model.hidden(tokens, cache)[0, -1])  # the head is needed at the last token only


def decode(model: Decoder, token: int, cache: Cache) -> Tensor:
    """Run one token, attending to everything cached; returns the logits (V,) of the token after it."""
    return prefill(model, [token], cache)  # the same computation on a prompt of one: that is what a cache buys


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
    backend: str = "auto",
) -> list[int]:
    """Continue a prompt by up to `max_new_tokens` tokens; returns the new ones, a stop token included as the last.

    sampling: None is greedy. on_token: called with each id as soon as it is known. use_cache=False recomputes the
    whole sequence for every token: the same ids, slower. backend: see `minillm.attention`.
    Raises ValueError for an empty or too long prompt and for ids outside the vocabulary.
    """
    ids, stop = check_request(model, prompt_ids, max_new_tokens, sampling, stop_ids)
    generator = sampling.generator(model.device) if sampling is not None else None
    cache = KVCache(model, 1, len(ids) + max_new_tokens, backend=backend) if use_cache and max_new_tokens else NoCache(backend)
    new: list[int] = []
    while len(new) < max_new_tokens:
        if not new:
            logits = prefill(model, ids, cache)
        elif use_cache:
            logits = decode(model, new[-1], cache)
        else:
            logits = prefill(model, ids + new, cache)
        new.append(int(sample(logits, sampling, generator)))
        if on_token is not None:
            on_token(new[-1])
        if new[-1] in stop:
            break
    return new


def check_request(
    model: Decoder, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling | None, stop_ids: Iterable[int]
) -> tuple[list[int], frozenset[int]]:
    """The prompt as a list and the stop ids as a set, or one sentence about what is wrong with the request."""
    if isinstance(prompt_ids, (str, bytes)):
        raise TypeError("prompt_ids is a string; encode it first: tokenizer.encode(text).")
    try:
        ids = [operator.index(i) for i in prompt_ids]
    except TypeError as error:
        raise TypeError(f"prompt_ids must be whole numbers, as tokenizer.encode returns them ({error}).") from error
    vocab, limit = model.config.vocab_size, model.config.max_seq_len
    if not ids:
        raise ValueError("prompt_ids is empty; give at least one token.")
    if not all(0 <= i < vocab for i in ids):
        bad = next(i for i in ids if not 0 <= i < vocab)
        raise ValueError(f"prompt_ids holds {bad}; ids must be from 0 to {vocab - 1}.")
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number, 0 or more.")
    if len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the {limit} positions of {model.config.name}; ask for fewer."
        )
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {sampling!r}; give a minillm.Sampling, or None for greedy.")
    return ids, frozenset(stop_ids)
