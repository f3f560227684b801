"""Tokenizers as checkpoints store them: the metadata of GGUF files, and tokenizer.json.

Supported is byte-level BPE as GPT-2, SmolLM2, Llama 3 and Qwen cut and merge text. Any other kind
(SentencePiece, WordPiece) is refused by name.
"""

import math
from pathlib import Path
from typing import Any

import regex  # of tiktoken's dependencies: the syntax of its patterns

from minillm.tokenizer import SAMPLE, Tokenizer
from minillm.tools.checks import brief
from minillm.weights.files import MEGABYTE, read_json, read_text

# How text is cut before merging: GPT-2's pattern (Radford et al. 2019), and its descendants.
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2 first cuts out every digit, then applies GPT-2's pattern to what is left. As one
# expression, a run of spaces stays whole even if a digit follows it.
_SMOLLM = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GGUF_PATTERNS = {"smollm": _SMOLLM, "gpt-2": _GPT2, "llama-bpe": _LLAMA3, "qwen2": _QWEN2}

# Bounds for a pattern, which its compiler writes out with all its repetitions, and for trying it on
# one line of text. Honest ones have some 300 characters, repeat thrice and take microseconds.
_PATTERN_LENGTH, _PATTERN_REPEATS, _PATTERN_SECONDS = 2000, 1000, 1.0

# Token types in GGUF files
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def tokenizer_from_gguf(fields: dict[str, Any], name: str = "gguf") -> Tokenizer:
    """From the metadata of a GGUF file (`tokenizer.ggml.*` and `tokenizer.chat_template`)."""

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{key}", default)

    try:
        model, pre = get("model"), get("pre")
        if model != "gpt2" or pre not in _GGUF_PATTERNS:
            raise ValueError(
                f"The GGUF tokenizer {brief(model)} with pre-tokenizer {brief(pre)} is not "
                f"implemented; supported is gpt2 with one of {', '.join(_GGUF_PATTERNS)}."
            )
        tokens, types = get("tokens"), get("token_type")
        lists = isinstance(tokens, list) and isinstance(types, list)
        if not lists or len(tokens) != len(types):
            raise ValueError(
                "The GGUF file's tokenizer.ggml.tokens and token_type are missing or of different "
                "lengths."
            )
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise ValueError("The GGUF file's vocabulary holds the same token twice.")
        kinds = dict(zip(tokens, types, strict=True))
        special = {t: i for t, i in vocab.items() if kinds[t] in (_CONTROL, _USER_DEFINED)}
        stop = [get(f"{kind}_token_id") for kind in ("eos", "eot", "eom")]
        bos = get("bos_token_id")
        if bos is not None and not 0 <= bos < len(tokens):
            raise ValueError(
                f"The first or prefix id {brief(bos)} is outside the vocabulary of {len(tokens)} "
                "tokens."
            )
        named = {"bos_token": bos, "eos_token": stop[0]}
        starts_with_bos = get("add_bos_token", pre == "llama-bpe") and bos is not None
        return Tokenizer(
            {t: i for t, i in vocab.items() if kinds[t] != _UNUSED},
            [_pair(merge) for merge in get("merges", [])],
            special=special,
            pattern=_GGUF_PATTERNS[pre],
            stop_ids=[i for i in stop if i is not None],
            prefix_ids=[bos] if starts_with_bos else [],
            chat_template=fields.get("tokenizer.chat_template"),
            chat_tokens={
                key: tokens[i] for key, i in named.items() if i is not None and 0 <= i < len(tokens)
            },
            nfc=pre == "qwen2",
            name=name,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "The GGUF file's tokenizer metadata has a value of the wrong kind "
            f"({brief(str(error))})."
        ) from error


def tokenizer_from_folder(folder: str | Path) -> Tokenizer | None:
    """From a Hugging Face folder's tokenizer.json and its neighbours; None if there is none."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    raw = read_json(path, limit=64 * MEGABYTE)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path, limit=20 * MEGABYTE, missing_ok=True)
    try:
        model, normalizer = raw["model"], raw.get("normalizer")
        added = raw.get("added_tokens", [])
        _refuse_unsupported(model, normalizer, added)
        special = {token["content"]: token["id"] for token in added}
        every = (*model["vocab"].items(), *special.items())
        if not all(isinstance(text, str) and type(i) is int for text, i in every):
            raise ValueError("tokenizer.json maps something else than strings to whole numbers.")
        chat_tokens = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token")}
        stop = _stop_ids(folder)
        if chat_tokens["eos_token"] in special:
            stop.append(special[chat_tokens["eos_token"]])
        return Tokenizer(
            model["vocab"],
            [_pair(merge) for merge in model["merges"]],
            special=special,
            pattern=_pattern(raw.get("pre_tokenizer")),
            stop_ids=stop,
            prefix_ids=_prefix(raw.get("post_processor"), special),
            chat_template=_template(folder, settings),
            chat_tokens=chat_tokens,
            nfc=normalizer is not None,
            name=folder.name,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a tokenizer file as Hugging Face writes it ({brief(repr(error))})."
        ) from error


def _refuse_unsupported(
    model: dict[str, Any], normalizer: Any, added: list[dict[str, Any]]
) -> None:
    """Raise ValueError for every option that would change the ids and is not built."""
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise ValueError(
            f"The tokenizer model {brief(model.get('type'))} is not implemented; only byte-level "
            "BPE can be read."
        )
    if normalizer not in (None, {"type": "NFC"}):
        raise ValueError(
            f"The normalizer {brief(normalizer)} is not implemented; supported are none and NFC."
        )
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(
                f"The tokenizer model's {option} {brief(model[option])} is not implemented."
            )
    for token in added:
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise ValueError(
                    f"The option {option} of the added token {brief(token['content'])} is not "
                    "implemented."
                )


def _template(folder: Path, settings: dict[str, Any]) -> Any:
    """The chat template: a file of its own, or an entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, MEGABYTE)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return next((t["template"] for t in template if t["name"] == "default"), None)
    return template


def _token_text(value: Any) -> str:
    return (value.get("content") if isinstance(value, dict) else value) or ""


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """A merge as two strings, from "a b" or ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) != 2:
        raise ValueError(f"The merge {brief(merge)} is not a pair of tokens.")
    return parts[0], parts[1]


def _pattern(pre: dict[str, Any] | None) -> str:
    """The cutting pattern of a pre_tokenizer; ValueError naming one that is not implemented."""
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre]
    kinds = [step["type"] if step else None for step in steps]
    if kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space"):
        first, cuts = steps[0], steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and cuts:
            return _GPT2
        if kinds == ["Digits", "ByteLevel"] and cuts and first.get("individual_digits"):
            return _SMOLLM
        isolates = first.get("behavior") == "Isolated" and not first.get("invert")
        if kinds == ["Split", "ByteLevel"] and not cuts and isolates:
            return _checked_pattern(first["pattern"]["Regex"])
    raise ValueError(
        f"The pre-tokenizer {brief(pre)} is not implemented; supported are those of GPT-2, "
        "SmolLM2, Llama 3 and Qwen."
    )


def _checked_pattern(pattern: str) -> str:
    """The pattern, if it cuts a text of every kind of character into words, and soon.

    tiktoken would silently drop what a pattern does not match.
    """
    named = f"The pre-tokenizer's pattern {brief(pattern)}"
    counts = regex.findall(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}", pattern[:_PATTERN_LENGTH])
    repeats = math.prod(int(n) for pair in counts for n in pair if n.strip("0"))
    if len(pattern) > _PATTERN_LENGTH or repeats > _PATTERN_REPEATS:
        raise ValueError(
            f"{named} is longer than {_PATTERN_LENGTH} characters, or repeats something more than "
            f"{_PATTERN_REPEATS} times; it cannot be used."
        )
    try:
        left = regex.sub(pattern, "", SAMPLE, timeout=_PATTERN_SECONDS)
    except TimeoutError as error:
        raise ValueError(
            f"{named} takes more than {_PATTERN_SECONDS:g} s for a line of text; it cannot be used."
        ) from error
    except (regex.error, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{named} is not a regular expression that can be used ({brief(str(error))})."
        ) from error
    if left:
        raise ValueError(
            f"{named} leaves out {left!r}; only patterns that cut all text can be used."
        )
    return pattern


def _prefix(post: dict[str, Any] | None, special: dict[str, int]) -> list[int]:
    """Ids that the post-processor puts before every text (Llama 3's <|begin_of_text|>)."""
    steps = post["processors"] if post and post["type"] == "Sequence" else [post] if post else []
    ids = []
    for step in steps:
        if step["type"] == "TemplateProcessing":
            single = step["single"]
            if not single or "Sequence" not in single[-1]:
                raise ValueError(
                    "A post-processor that appends tokens to every text is not implemented."
                )
            ids += [special[part["SpecialToken"]["id"]] for part in single[:-1]]
        elif step["type"] != "ByteLevel":
            raise ValueError(f"The post-processor {brief(step['type'])} is not implemented.")
    return ids


def _stop_ids(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: a number, a list, or nothing."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name, missing_ok=True).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int for i in ids):
                raise ValueError(
                    f"{folder / name} has eos_token_id = {brief(value)}; expected a whole number "
                    "or a list of them."
                )
            return list(ids)
    return []
