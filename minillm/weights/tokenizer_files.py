"""Tokenizers as checkpoints store them: the metadata of GGUF files, and tokenizer.json.

Byte-level BPE as GPT-2, SmolLM2, Llama 3 and Qwen split and merge text is supported. Any other kind
(SentencePiece, WordPiece) is refused by name.
"""

import math
from pathlib import Path
from typing import Any

import regex  # a dependency of tiktoken, with the syntax of its patterns

from minillm.tokenizer import SAMPLE, Tokenizer
from minillm.tools.checks import brief
from minillm.vocabulary import byte_alphabet
from minillm.weights.files import MEGABYTE, read_json, read_text
from minillm.weights.special_tokens import SpecialTokens

# How text is split before merging: GPT-2's pattern (Radford et al. 2019), and its descendants.
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2 first splits off every digit, then applies GPT-2's pattern to the rest. As one expression:
# a run of spaces stays whole even if a digit follows it.
_SMOLLM = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GGUF_PATTERNS = {"smollm": _SMOLLM, "gpt-2": _GPT2, "llama-bpe": _LLAMA3, "qwen2": _QWEN2}

# Limits for a pattern, whose repetitions its compiler writes out, and for trying it on one line of
# text. Published patterns stay far below them.
_PATTERN_LENGTH, _PATTERN_REPEATS, _PATTERN_SECONDS = 2000, 1000, 1.0

# Token types in GGUF files
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# Converters have written wrong ids for the end of an answer, so llama.cpp knows it by its text as
# well (llama-vocab.cpp, special_eog_ids), also where it's marked as an ordinary token. Without the
# texts of families that are not implemented here. "</s>" is an HTML tag, too.
_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<|end_of_turn|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<eos>", "<｜end▁of▁sentence｜>",
})  # fmt: skip


def tokenizer_from_gguf(fields: dict[str, Any], name: str = "gguf") -> Tokenizer:
    """From the metadata of a GGUF file (`tokenizer.ggml.*` and `tokenizer.chat_template`).

    Raises ValueError for a tokenizer that is damaged or not implemented.
    """
    try:
        return _from_gguf(fields, name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            "The GGUF file's tokenizer metadata has a value of the wrong kind "
            f"({brief(str(error))})."
        ) from error


def _from_gguf(fields: dict[str, Any], name: str) -> Tokenizer:
    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{key}", default)

    model, pre = get("model"), get("pre")
    if model != "gpt2" or pre not in _GGUF_PATTERNS:
        raise ValueError(
            f"The GGUF tokenizer {brief(model)} with pre-tokenizer {brief(pre)} is not "
            f"implemented; only gpt2 with one of {', '.join(_GGUF_PATTERNS)} is supported."
        )
    # Vocabulary: a token's place in the list is its id, and its type says what it is for.
    ids, types = _gguf_vocabulary(get("tokens"), get("token_type"))
    tokens = list(ids)
    # Ids with a role
    stop = [get(f"{kind}_token_id") for kind in ("eos", "eot", "eom")]
    marked = {t for t, kind in types.items() if kind in (_CONTROL, _USER_DEFINED)}
    ends = {t for t in _ENDS if types.get(t, _UNUSED) != _UNUSED} | marked & {"</s>"}
    bos = get("bos_token_id")
    if bos is not None and not 0 <= bos < len(tokens):
        raise ValueError(
            f"The bos_token_id {brief(bos)} is outside the vocabulary of {len(tokens)} tokens."
        )
    named = {"bos_token": bos, "eos_token": stop[0]}
    starts_with_bos = get("add_bos_token", pre == "llama-bpe") and bos is not None
    return Tokenizer(
        {t: i for t, i in ids.items() if types[t] != _UNUSED},
        [_pair(merge) for merge in get("merges", [])],
        special={t: ids[t] for t in marked | ends},
        pattern=_GGUF_PATTERNS[pre],
        stop_ids=[*(i for i in stop if i is not None), *(ids[t] for t in ends)],
        prefix_ids=[bos] if starts_with_bos else [],
        chat_template=fields.get("tokenizer.chat_template"),
        chat_tokens={
            key: tokens[i] for key, i in named.items() if i is not None and 0 <= i < len(tokens)
        },
        nfc=pre == "qwen2",
        ignore_merges=pre == "llama-bpe",  # as llama.cpp does
        name=name,
    )


def _gguf_vocabulary(tokens: Any, types: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The id and the type of each token, from two lists in the order of ids."""
    lists = isinstance(tokens, list) and isinstance(types, list)
    if not lists or len(tokens) != len(types):
        raise ValueError(
            "The GGUF file's tokenizer.ggml.tokens and token_type are missing or of different "
            "lengths."
        )
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError("The GGUF file's vocabulary holds the same token twice.")
    return ids, dict(zip(tokens, types, strict=True))


def tokenizer_from_folder(folder: str | Path) -> Tokenizer | None:
    """From a Hugging Face folder's tokenizer.json and the files beside it; None without one.

    Raises ValueError for a tokenizer that is damaged or not implemented.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    raw = read_json(path, limit=64 * MEGABYTE)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path, limit=20 * MEGABYTE, missing_ok=True)
    try:
        return _from_hf(raw, settings, folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a tokenizer file as Hugging Face writes it ({brief(repr(error))})."
        ) from error


def _from_hf(raw: dict[str, Any], settings: dict[str, Any], folder: Path) -> Tokenizer:
    model, normalizer = raw["model"], raw.get("normalizer")
    _refuse_unsupported(model, normalizer)
    # Vocabulary
    tokens = SpecialTokens(folder, raw, settings)
    every = (*model["vocab"].items(), *tokens.ids.items())
    if not all(isinstance(text, str) and type(i) is int for text, i in every):
        raise ValueError("tokenizer.json maps something other than strings to whole numbers.")
    # Ids with a role: an answer ends with the model's eos_token_id, and with the tokenizer's.
    stop = _stop_ids(folder)
    if tokens.named.get("eos_token"):
        stop.append(tokens.ids[tokens.named["eos_token"]])
    return Tokenizer(
        model["vocab"],
        [_pair(merge) for merge in model["merges"]],
        special=tokens.ids,
        pattern=_pattern(raw.get("pre_tokenizer")),
        stop_ids=stop,
        prefix_ids=_prefix(raw.get("post_processor"), tokens.ids),
        chat_template=_template(folder, settings),
        chat_tokens=tokens.named,
        nfc=normalizer is not None,
        ignore_merges=bool(model.get("ignore_merges")),
        name=folder.name,
    )


def _refuse_unsupported(model: dict[str, Any], normalizer: Any) -> None:
    """Raise ValueError for each option that would change the ids and is not implemented."""
    # How words become tokens
    if model.get("type", "BPE") != "BPE":
        raise ValueError(
            f"The tokenizer model {brief(model['type'])} is not implemented; only byte-level BPE "
            "can be read."
        )
    if model.get("byte_fallback"):
        raise ValueError(
            "The tokenizer model has byte_fallback, as Llama 2's (SentencePiece), which is not "
            "implemented; only byte-level BPE can be read."
        )
    if model.get("dropout"):
        raise ValueError(
            f"The tokenizer model's dropout {brief(model['dropout'])} gives other ids each time; "
            "set it to null in tokenizer.json."
        )
    if normalizer not in (None, {"type": "NFC"}):
        raise ValueError(
            f"The normalizer {brief(normalizer)} is not implemented; only none and NFC are "
            "supported."
        )
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(
                f"The tokenizer model's {option} {brief(model[option])} is not implemented."
            )
    unknown = model.get("unk_token")
    if unknown is not None and not model["vocab"].keys() >= byte_alphabet().keys():
        raise ValueError(
            f"The tokenizer model's unk_token {brief(unknown)} stands for bytes that the "
            "vocabulary lacks, which is not implemented; train one with the whole byte alphabet."
        )


def _template(folder: Path, settings: dict[str, Any]) -> Any:
    """The chat template: a file of its own, or an entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, MEGABYTE)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return {part["name"]: part["template"] for part in template}
    return template


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """A merge as two strings, from "a b" or ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) != 2:
        raise ValueError(f"The merge {brief(merge)} is not a pair of tokens.")
    return parts[0], parts[1]


def _pattern(pre: dict[str, Any] | None) -> str:
    """The regular expression of a pre_tokenizer; ValueError for one that is not implemented."""
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre]
    kinds = [step["type"] if step else None for step in steps]
    if kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space"):
        first, cuts = steps[0], steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and cuts:
            return _GPT2
        if kinds == ["Digits", "ByteLevel"] and cuts and first.get("individual_digits"):
            return _SMOLLM
        # Llama 3 and Qwen: any pattern whose matches are the words
        isolates = first.get("behavior") == "Isolated" and not first.get("invert")
        isolates = isolates and "Regex" in first["pattern"]
        if kinds == ["Split", "ByteLevel"] and not cuts and isolates:
            return _checked_pattern(first["pattern"]["Regex"])
    raise ValueError(
        f"The pre-tokenizer {brief(pre)} is not implemented; only those of GPT-2, SmolLM2, Llama 3 "
        "and Qwen are supported."
    )


def _checked_pattern(pattern: str) -> str:
    """The pattern, if it splits text of every kind of character into words, quickly.

    tiktoken would silently drop what a pattern does not match.
    """
    # Length and repetitions first: no timeout stops the compiler.
    named = f"The pre-tokenizer's pattern {brief(pattern)}"
    counts = regex.findall(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}", pattern[:_PATTERN_LENGTH])
    repeats = math.prod(int(n) for pair in counts for n in pair if n.strip("0"))
    if len(pattern) > _PATTERN_LENGTH or repeats > _PATTERN_REPEATS:
        raise ValueError(
            f"{named} is longer than {_PATTERN_LENGTH} characters, or repeats something more than "
            f"{_PATTERN_REPEATS} times; it cannot be used."
        )
    # Then a trial: nothing of the sample may be left.
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
            f"{named} leaves out {left!r}; only patterns that match all text can be used."
        )
    return pattern


def _prefix(post: dict[str, Any] | None, special: dict[str, int]) -> list[int]:
    """Ids that the post-processor puts before every text (Llama 3's <|begin_of_text|>).

    add_bos_token in tokenizer_config.json is of no effect beside a tokenizer.json (transformers).
    """
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
