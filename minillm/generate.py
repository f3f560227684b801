"""Generation: prefill the prompt in one pass, then decode token by token. The loop, nothing else.

Source: Pope et al. 2022, section 2 (the two phases).
Cost: prefill `costs.prefill_flops(config, n)` once; then each token reads all weights and the cache
so far (`costs.decode_bytes`), which on most machines takes longer than the arithmetic.
Not here: several requests at once (the engine), drafts (speculative decoding).
"""

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from minillm.attention import check_backend
from minillm.cache import Cache, NoCache
from minillm.checks import brief, check_whole
from minillm.cuda_graphs import GraphedSequence, why_no_graphs
from minillm.kv_cache import KVCache
from minillm.model import Decoder
from minillm.sampling import Sampling, draw, likeliest

WORTH_CAPTURING = 32
"""On a CUDA device, decode steps become a graph from so many new tokens on.

Capturing it takes as long as three or four steps without one.
"""


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
    cuda_graphs: bool | None = None,
) -> list[int]:
    """Continue a prompt by up to `max_new_tokens` tokens.

    Returns the new ones, a stop token included as the last. sampling: None is greedy. on_token:
    called with each id as soon as it is known. backend: see `minillm.attention`.
    use_cache=False recomputes the whole sequence for every token: the same ids, slower. cache: one
    of the caller's, for one sequence, with room for the prompt and the answer. cuda_graphs: whether
    decode steps are replayed as a CUDA graph (`minillm.cuda_graphs`); None where that pays.
    Raises ValueError for an empty or too long prompt, for ids outside the vocabulary, and for
    cuda_graphs=True where it is impossible.
    """
    ids, stop = check_request(model, prompt_ids, max_new_tokens, sampling, stop_ids)
    check_backend(backend)
    graphed = _wants_graphs(model, max_new_tokens, use_cache, cache, backend, cuda_graphs)
    uniforms = sampling.uniforms(max_new_tokens) if sampling is not None else None
    sequence = GraphedSequence(model, len(ids) + max_new_tokens, backend) if graphed else None
    if cache is None and use_cache and max_new_tokens and not graphed:
        cache = KVCache(model, 1, len(ids) + max_new_tokens, backend=backend)
    new: list[int] = []
    while len(new) < max_new_tokens:
        if sequence is not None:
            logits, best = sequence.logits(new[-1:] or ids)
        else:
            if cache is None:
                one = prefill(model, ids + new, NoCache(backend))
            else:
                one = decode(model, new[-1], cache) if new else prefill(model, ids, cache)
            logits, best = one[None], likeliest(one)
        uniform = 0.0 if uniforms is None else uniforms[len(new)]
        (token,) = draw(logits, [int(best)], [0], [sampling], [uniform])
        if token < 0:
            raise ValueError("The model's logits are not numbers (NaN); nothing can be drawn.")
        new.append(token)
        if on_token is not None:
            on_token(token)
        if token in stop:
            break
    return new


def _wants_graphs(
    model: Decoder,
    max_new_tokens: int,
    use_cache: bool,
    cache: Cache | None,
    backend: str,
    wanted: bool | None,
) -> bool:
    """Whether to capture the decode steps; ValueError if that is wanted and impossible."""
    if wanted is False or (wanted is None and max_new_tokens < WORTH_CAPTURING):
        return False
    why_not = why_no_graphs(model, backend)
    if not use_cache or cache is not None:
        why_not = "cuda_graphs needs a cache of its own; leave use_cache and cache as they are."
    if wanted and why_not:
        raise ValueError(why_not)
    return why_not is None


def check_request(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None,
    stop_ids: Iterable[int],
) -> tuple[list[int], frozenset[int]]:
    """The prompt as a list and the stop ids as a set, if the request makes sense."""
    ids = _checked_ids("prompt_ids", prompt_ids)
    vocab, limit = model.config.vocab_size, model.config.max_seq_len
    if not ids:
        raise ValueError("prompt_ids is empty; give at least one token.")
    bad = next((i for i in ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise ValueError(f"prompt_ids holds {brief(bad)}; ids must be from 0 to {vocab - 1}.")
    check_whole("max_new_tokens", max_new_tokens, least=0)
    if len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"{len(ids)} prompt tokens and {brief(max_new_tokens)} new ones exceed the {limit} "
            f"positions of {model.config.name}; ask for fewer."
        )
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling is {brief(sampling)}; give a minillm.Sampling, or None for greedy."
        )
    return ids, frozenset(_checked_ids("stop_ids", stop_ids))


def _checked_ids(name: str, ids: Iterable[int]) -> list[int]:
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"{name} is a string; encode it first: tokenizer.encode(text).")
    try:
        return [operator.index(i) for i in ids]
    except TypeError as error:
        raise TypeError(
            f"{name} must be whole numbers, as tokenizer.encode returns them ({error})."
        ) from error
