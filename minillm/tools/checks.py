"""Checks shared by several modules, so that one mistake always gets the same message."""

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.config import ModelConfig


def brief(value: object, limit: int = 100) -> str:
    """`repr(value)` for an error message: escaped, and cut after `limit` characters.

    Values from files can have any length and hold any characters.
    """
    text = repr(value[: limit + 1] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= limit + 2 else f"{text[:limit]}…"


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless `value` is an int (not a bool, not 2.0) of `least` or more."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {brief(value)}; it must be a whole number, {least} or more.")


def check_request(
    config: "ModelConfig",
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Iterable[int],
) -> tuple[list[int], frozenset[int]]:
    """The prompt as a list and the stop ids as a set, if a model of this config can answer it.

    Raises ValueError for a prompt that is empty or too long and for ids outside the vocabulary,
    TypeError for values that are not ids.
    """
    ids = _checked_ids("prompt_ids", prompt_ids)
    if not ids:
        raise ValueError("prompt_ids is empty; give at least one token.")
    bad = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if bad is not None:
        raise ValueError(
            f"prompt_ids holds {brief(bad)}; ids must be from 0 to {config.vocab_size - 1}."
        )
    check_whole("max_new_tokens", max_new_tokens, least=0)
    if len(ids) + max_new_tokens > config.max_seq_len:
        raise ValueError(
            f"{len(ids)} prompt tokens and {brief(max_new_tokens)} new ones exceed the "
            f"{config.max_seq_len} positions of {config.name}; ask for fewer."
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


def check_token(token: int, model: str = "model") -> int:
    """Return `token`; ValueError for -1, which stands for logits that are NaN."""
    if token < 0:
        raise ValueError(f"The {model}'s logits are not numbers (NaN); nothing can be drawn.")
    return token
