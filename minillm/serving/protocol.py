"""What a client may ask: the bodies of OpenAI's /v1/completions and /v1/chat/completions.

Source: OpenAI's API reference; `top_k`, `ignore_eos` and `continuous_usage_stats` as in vLLM.
A field is obeyed, or refused by name: nothing is silently ignored, and nothing that a client sends
reaches the engine unchecked. Fields that many clients always send are accepted with the one value
that changes nothing (`_WITHOUT_EFFECT`).
Not here: tools, images, structured outputs, penalties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm.sampling import Sampling
from minillm.serving.fields import RefusedError, flag, number, whole
from minillm.tools.checks import brief

MAX_PROMPTS, MAX_N, MAX_TOP_LOGPROBS = 256, 64, 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 500  # strings, characters of each

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "user": lambda x: isinstance(x, str),  # an id for the provider's statistics
    "metadata": lambda x: x == {},
    "store": lambda x: x is False,
    "service_tier": lambda x: x in ("auto", "default"),
    "frequency_penalty": lambda x: x == 0,
    "presence_penalty": lambda x: x == 0,
    "repetition_penalty": lambda x: x == 1,
    "length_penalty": lambda x: x == 1,
    "min_p": lambda x: x == 0,
    "min_tokens": lambda x: x == 0,
    "logit_bias": lambda x: x == {},
    "best_of": lambda x: x == 1,
    "use_beam_search": lambda x: x is False,
    "suffix": lambda x: x == "",
    "tools": lambda x: x == [],
    "tool_choice": lambda x: x in ("none", "auto"),  # without tools there is nothing to choose
    "parallel_tool_calls": lambda x: isinstance(x, bool),
    "response_format": lambda x: x == {"type": "text"},
    "modalities": lambda x: x == ["text"],
    "skip_special_tokens": lambda x: x is True,
    "spaces_between_special_tokens": lambda x: x is True,
    "add_special_tokens": lambda x: x is True,
    "add_generation_prompt": lambda x: x is True,
}


@dataclass(frozen=True)
class Ask:
    """A checked request. Either `messages` or `prompts`, which are texts or token ids.

    max_tokens: None is as many as there is room for. top_logprobs: None without log-probabilities.
    """

    messages: list[dict[str, str]] | None
    prompts: list[str | list[int]]
    max_tokens: int | None
    n: int
    samplings: list[Sampling]
    stop: list[str]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    top_logprobs: int | None
    echo: bool

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return self.messages is not None


def read_ask(body: dict[str, Any], *, chat: bool, model: str) -> Ask:
    """Check a body field by field; RefusedError that names the first that cannot be obeyed."""
    left = dict(body)
    named = left.pop("model", None)
    if named not in (None, model):
        raise RefusedError(
            f"The model {brief(named)} is not served here; ask for {model!r}.",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip
    messages = _messages(left) if chat else None
    prompts = [] if chat else _prompts(left)
    n = whole(left, "n", 1, 1, MAX_N)
    stream = flag(left, "stream")
    include_usage, continuous_usage = _stream_options(left, stream)
    ask = Ask(
        messages, prompts, _max_tokens(left, chat), n, _samplings(left, n), _stop(left),
        flag(left, "ignore_eos"), stream, include_usage, continuous_usage,
        _top_logprobs(left, chat), not chat and flag(left, "echo"),
    )  # fmt: skip
    for name, value in left.items():
        _refuse_unless_without_effect(name, value)
    return ask


def _refuse_unless_without_effect(name: str, value: object) -> None:
    allowed = _WITHOUT_EFFECT.get(name)
    if allowed is None:
        raise RefusedError(
            f"The field {brief(name)} is not supported; leave it out.",
            param=name[:100], code="unsupported_parameter",
        )  # fmt: skip
    if value is not None and not allowed(value):
        raise RefusedError(
            f"{name} is {brief(value)}, which is not supported; leave it out.",
            param=name, code="unsupported_value",
        )  # fmt: skip


def _messages(left: dict[str, Any]) -> list[dict[str, str]]:
    messages = left.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise RefusedError(
            f"messages is {brief(messages)}; give a list of at least one message.",
            param="messages",
        )  # fmt: skip
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: object) -> dict[str, str]:
    """A message with its content as one string; parts of text are joined."""
    where = f"messages[{i}]"
    if not isinstance(message, dict):
        raise RefusedError(f"{where} is {brief(message)}; give role and content.", param=where)
    more = next((k for k, v in message.items() if k not in ("role", "content") and v), None)
    if more is not None:
        raise RefusedError(
            f"{where} has {brief(more)}, which is not supported; give role and content only.",
            param=where, code="unsupported_parameter",
        )  # fmt: skip
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise RefusedError(
            f"{where}.role is {brief(role)}; it must be system, user or assistant.",
            param=f"{where}.role",
        )  # fmt: skip
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RefusedError(
                f"{where}.content holds {brief(part)}; give a string, or parts of type text.",
                param=f"{where}.content",
            )  # fmt: skip
    return {"role": role, "content": "".join(part["text"] for part in parts)}


def _prompts(left: dict[str, Any]) -> list[str | list[int]]:
    """One prompt or a list of them, each a string or a list of token ids."""
    prompt = left.pop("prompt", None)
    one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    )
    prompts = [prompt] if one else prompt
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise RefusedError(
            f"prompt is {brief(prompt)}; give a string, a list of token ids, or a list of either.",
            param="prompt",
        )  # fmt: skip
    if len(prompts) > MAX_PROMPTS:
        raise RefusedError(
            f"prompt holds {len(prompts)} prompts; give at most {MAX_PROMPTS}.", param="prompt"
        )
    return prompts


def _is_prompt(prompt: object) -> bool:
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    return isinstance(prompt, str) or is_ids


def _max_tokens(left: dict[str, Any], chat: bool) -> int | None:
    default = None if chat else _DEFAULT_COMPLETION_TOKENS
    old = whole(left, "max_tokens", None, int(chat))
    new = whole(left, "max_completion_tokens", None, int(chat)) if chat else None
    if None not in (old, new) and old != new:
        raise RefusedError(
            f"max_tokens is {old} and max_completion_tokens {new}; give one of them.",
            param="max_tokens",
        )  # fmt: skip
    given = old if new is None else new
    return default if given is None else given


def _samplings(left: dict[str, Any], n: int) -> list[Sampling]:
    """One for each of n answers; with a seed each has one of its own, counted on from it."""
    temperature = number(left, "temperature", 1.0, 2)
    top_p = number(left, "top_p", 1.0, 1)
    if top_p == 0:
        raise RefusedError(
            "top_p is 0; give a number above 0, or temperature 0 for the likeliest token.",
            param="top_p",
        )  # fmt: skip
    top_k = whole(left, "top_k", -1, -1)  # vLLM's -1, and 0, are no limit
    seed = whole(left, "seed", None, 0, 2**63 - 1)
    k = top_k if top_k > 0 else None
    p = top_p if top_p < 1 else None
    return [Sampling(temperature, k, p, None if seed is None else seed + i) for i in range(n)]


def _stop(left: dict[str, Any]) -> list[str]:
    stop = left.pop("stop", None)
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    fits = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not fits or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        raise RefusedError(
            f"stop is {brief(stop)}; give at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} "
            "characters.",
            param="stop",
        )  # fmt: skip
    return stops


def _stream_options(left: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    options = left.pop("stream_options", None)
    if options is None:
        return False, False
    names = ("include_usage", "continuous_usage_stats")
    if not stream or not isinstance(options, dict) or not set(options) <= set(names):
        raise RefusedError(
            f"stream_options is {brief(options)}; with stream it may hold {' and '.join(names)}, "
            "and nothing without.",
            param="stream_options",
        )  # fmt: skip
    options = dict(options)
    include_usage, continuous_usage = (flag(options, name) for name in names)
    return include_usage, continuous_usage


def _top_logprobs(left: dict[str, Any], chat: bool) -> int | None:
    """How many of the likeliest tokens to give; None if no log-probabilities are asked for."""
    if not chat:  # the number itself
        return whole(left, "logprobs", None, 0, MAX_TOP_LOGPROBS)
    wanted = flag(left, "logprobs")
    top = whole(left, "top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise RefusedError(
            f"top_logprobs is {top} without logprobs; set logprobs to true.", param="top_logprobs"
        )
    return (top or 0) if wanted else None
