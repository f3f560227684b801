"""Text to token ids and back, with the vocabulary that came with the checkpoint.

A byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in Radford et al. 2019, section 2.2) is three things: a regular
expression that cuts text into words, a list of byte strings, and the order in which neighbours merge. Checkpoints
store them in a GGUF file or in tokenizer.json; this module reads either and hands them to `tiktoken`, which does the
work. In every vocabulary read here the id order of the merged tokens *is* the merge order; a file where it is not,
or with another kind of tokenizer (SentencePiece, WordPiece), is refused.
Ids equal those of Hugging Face's tokenizers on the same file.
"""

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import regex  # of tiktoken's dependencies: the syntax of its patterns
import tiktoken

# How text is cut before merging: GPT-2's pattern (Radford et al. 2019), and two descendants.
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2 first cuts out every digit, then applies GPT-2's pattern to what is left; as one expression, a run of
# spaces stays whole also when a digit follows it.
_SMOLLM = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GGUF_PATTERNS = {"smollm": _SMOLLM, "gpt-2": _GPT2, "llama-bpe": _LLAMA3, "qwen2": _QWEN2}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as vocabulary files spell it: 'Ġ' is the space, 'Ċ' the newline."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """Encode, decode and chat in a checkpoint's own vocabulary.

    stop_ids: ids that end an answer. special: text -> id of control tokens, matched in the text before anything else.
    encoding: the `tiktoken.Encoding` that does the work.
    """

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        special: dict[str, int],
        pattern: str,
        stop_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        chat_template: str | None = None,
        chat_tokens: dict[str, str] | None = None,
        nfc: bool = False,
        name: str = "custom",
    ):
        alphabet = _byte_alphabet()
        ranks: dict[bytes, int] = {}
        for text, i in vocab.items():
            if text in special:
                continue
            try:
                ranks[bytes(alphabet[c] for c in text)] = i
            except KeyError as error:
                raise ValueError(f"Token {i} ({text!r}) is not in GPT-2's byte alphabet; only byte-level BPE can be read.") from error
        ids = [*ranks.values(), *special.values()]
        if len(set(ids)) != len(ids) or any(vocab.get(text, i) != i for text, i in special.items()):
            raise ValueError("Two tokens of this vocabulary share an id, or one has two ids; each needs its own.")
        _check_merge_order(vocab, merges, ranks)
        self.n_vocab = 1 + max([*ranks.values(), *special.values()], default=-1)
        # tiktoken needs every byte. A byte that the vocabulary lacks gets an id past its end, and is dropped from the
        # text: that is what Hugging Face's BPE does with a character it does not know.
        self._missing = {byte for byte in range(256) if bytes([byte]) not in ranks}
        ranks |= {bytes([byte]): self.n_vocab + byte for byte in self._missing}
        self.special = dict(special)
        self.stop_ids = tuple(sorted(set(stop_ids)))
        for i in (*self.stop_ids, *prefix_ids):
            if not 0 <= i < self.n_vocab:
                raise ValueError(f"The stop or prefix id {i} is outside the vocabulary of {self.n_vocab} tokens.")
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(f"The chat template is a {type(chat_template).__name__}; it must be a text.")
        self.chat_template = chat_template
        self._chat_tokens = chat_tokens or {}
        self._prefix = list(prefix_ids)
        self._nfc = nfc
        # Longest first, so that a control token that begins like another is not cut short.
        by_length = sorted(filter(None, special), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if by_length else None
        try:
            self.encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special)
            self._word = regex.compile(pattern) if self._missing else None
        except Exception as error:  # tiktoken raises several kinds for a bad pattern or clashing ids
            raise ValueError(f"tiktoken cannot use this vocabulary or pattern: {error}.") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Control tokens spelled out in the text become their single id, as in Hugging Face."""
        return self._prefix + self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"encode needs a string, not {type(text).__name__}.")
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part in self.special:
                ids.append(self.special[part])
            elif part:
                part = unicodedata.normalize("NFC", part) if self._nfc else part
                ids += self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        """Ids of text in which no control token is looked for."""
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON and file names can smuggle in
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            utf8 = text.encode()
        if self._missing and not self._missing.isdisjoint(utf8):
            # Dropped inside each word and before merging: the neighbours of a dropped byte may merge.
            words = (bytes(b for b in m[0].encode() if b not in self._missing) for m in self._word.finditer(text))
            return [i for word in words if word for i in self.encoding._encode_single_piece(word)]
        try:
            return self.encoding.encode(text, disallowed_special=())  # encode_ordinary panics where this raises ValueError
        except ValueError as error:  # about 10⁶ spaces in a row
            raise ValueError(f"tiktoken cannot cut this text into words ({error}); give it in smaller parts.") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, control tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, i: int) -> bytes:
        """The bytes of one token; ValueError for an id outside the vocabulary, b"" for an id that it leaves unused."""
        if not 0 <= i < self.n_vocab:
            raise ValueError(f"{i} is not a token id; this vocabulary has ids 0 to {self.n_vocab - 1}.")
        try:
            return self.encoding.decode_single_token_bytes(i)
        except KeyError:
            return b""

    def stream(self) -> "StreamDecoder":
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the checkpoint's chat template, ending where the assistant's answer begins.

        messages: [{"role": "user" | "system" | "assistant", "content": text}, …].
        """
        if self.chat_template is None:
            raise ValueError("This checkpoint has no chat template; encode the text yourself, or load an instruct model.")
        for message in messages:
            if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"{message!r} is not a message; give dicts with the strings 'role' and 'content'.")
        if not messages:
            raise ValueError("messages is empty; give at least one.")
        return self._encode(_render(self.chat_template, messages, self._chat_tokens))

    @staticmethod
    def from_gguf(fields: dict[str, Any], name: str = "gguf") -> "Tokenizer":
        """From the metadata of a GGUF file (`tokenizer.ggml.*` and `tokenizer.chat_template`)."""

        def get(key: str, default: Any = None) -> Any:
            return fields.get(f"tokenizer.ggml.{key}", default)

        try:
            if get("model") != "gpt2" or get("pre") not in _GGUF_PATTERNS:
                raise ValueError(
                    f"The GGUF tokenizer {get('model')!r} with pre-tokenizer {get('pre')!r} is not implemented; "
                    f"supported is gpt2 with one of {', '.join(_GGUF_PATTERNS)}."
                )
            tokens, types = get("tokens"), get("token_type")
            if not isinstance(tokens, list) or not isinstance(types, list) or len(tokens) != len(types):
                raise ValueError("The GGUF file's tokenizer.ggml.tokens and token_type are missing or of different lengths.")
            vocab = {t: i for i, t in enumerate(tokens)}
            if len(vocab) != len(tokens):
                raise ValueError("The GGUF file's vocabulary holds the same token twice.")
            special = {t: i for i, t in enumerate(tokens) if types[i] in (3, 4)}  # CONTROL, USER_DEFINED
            unused = {t for i, t in enumerate(tokens) if types[i] == 5}
            stop = [get(f"{kind}_token_id") for kind in ("eos", "eot", "eom")]
            bos = get("bos_token_id")
            chat_tokens = {f"{kind}_token": tokens[i] for kind, i in (("bos", bos), ("eos", stop[0])) if i is not None and i < len(tokens)}
            return Tokenizer(
                {t: i for t, i in vocab.items() if t not in unused},
                [_pair(m) for m in get("merges", [])],
                special=special,
                pattern=_GGUF_PATTERNS[get("pre")],
                stop_ids=[i for i in stop if i is not None],
                prefix_ids=[bos] if get("add_bos_token", get("pre") == "llama-bpe") and bos is not None else [],
                chat_template=fields.get("tokenizer.chat_template"),
                chat_tokens=chat_tokens,
                nfc=get("pre") == "qwen2",
                name=name,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"The GGUF file's tokenizer metadata has a value of the wrong kind ({error!r}).") from error

    @staticmethod
    def from_hf(folder: str | Path) -> "Tokenizer | None":
        """From a Hugging Face folder's tokenizer.json and its neighbours; None when there is no tokenizer.json."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            return None
        raw = read_json(folder / "tokenizer.json")
        settings = read_json(folder / "tokenizer_config.json", missing_ok=True)
        try:
            pattern = _hf_pattern(raw.get("pre_tokenizer"))
            model, normalizer = raw["model"], raw.get("normalizer")
            if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
                raise ValueError(f"The tokenizer model {model.get('type')!r} is not implemented; only byte-level BPE can be read.")
            if normalizer not in (None, {"type": "NFC"}):
                raise ValueError(f"The normalizer {normalizer!r} is not implemented; supported are none and NFC.")
            for option in ("continuing_subword_prefix", "end_of_word_suffix"):
                if model.get(option):
                    raise ValueError(f"The tokenizer model's {option} {model[option]!r} is not implemented.")
            for token in raw.get("added_tokens", []):
                for option in ("lstrip", "rstrip", "single_word"):
                    if token.get(option):
                        raise ValueError(f"The option {option} of the added token {token['content']!r} is not implemented.")
            special = {t["content"]: t["id"] for t in raw.get("added_tokens", [])}
            if not all(isinstance(t, str) and type(i) is int for t, i in (*model["vocab"].items(), *special.items())):
                raise ValueError("tokenizer.json maps something else than strings to whole numbers.")
            template = settings.get("chat_template")
            if (folder / "chat_template.jinja").exists():
                template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            if isinstance(template, list):  # several named templates
                template = next((t["template"] for t in template if t["name"] == "default"), None)
            chat_tokens = {}
            for key in ("bos_token", "eos_token"):
                value = settings.get(key)
                chat_tokens[key] = (value.get("content") if isinstance(value, dict) else value) or ""
            stop = _hf_stop_ids(folder)
            if chat_tokens["eos_token"] in special:
                stop.append(special[chat_tokens["eos_token"]])
            return Tokenizer(
                model["vocab"],
                [_pair(m) for m in model["merges"]],
                special=special,
                pattern=pattern,
                stop_ids=stop,
                prefix_ids=_hf_prefix(raw.get("post_processor"), special),
                chat_template=template,
                chat_tokens=chat_tokens,
                nfc=normalizer is not None,
                name=folder.name,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer file as Hugging Face writes it ({error!r}).") from error


class StreamDecoder:
    """Ids in, text out, never half a character: bytes wait until their UTF-8 sequence is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, i: int) -> str:
        """Text that became complete with token `i`; may be empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(i))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object from a file somebody else wrote; ValueError or FileNotFoundError in one sentence."""
    if not path.exists():
        if missing_ok:
            return {}
        raise FileNotFoundError(f"{path} does not exist; a Hugging Face folder has it.")
    if path.stat().st_size > 200_000_000:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; that is too large for a JSON file of a checkpoint.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object.")
    return value


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """A merge as two strings, from "a b" or ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) != 2:
        raise ValueError(f"The merge {merge!r} is not a pair of tokens.")
    return parts[0], parts[1]


def _check_merge_order(vocab: dict[str, int], merges: Sequence[tuple[str, str]], ranks: dict[bytes, int]) -> None:
    """tiktoken merges the neighbours whose union has the smallest id; be sure that this is what the file means."""
    last, merged = -1, set()
    for left, right in merges:
        i = vocab.get(left + right)
        if i is None or left not in vocab or right not in vocab:
            raise ValueError(f"The merge {left!r} + {right!r} names a token that is not in the vocabulary.")
        if i in merged:
            continue  # a second way to make the same token
        if i < last:
            raise ValueError(f"The merge {left!r} + {right!r} comes out of the order of token ids; this vocabulary cannot be read.")
        last = i
        merged.add(i)
    if len(merged) + 256 < len(ranks):
        raise ValueError(f"{len(ranks)} tokens but only {len(merged)} merges: this is not a byte-level BPE vocabulary.")


def _hf_pattern(pre: dict[str, Any] | None) -> str:
    """The cutting pattern of a tokenizer.json's pre_tokenizer; ValueError naming one that is not implemented."""
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre]
    kinds = [step["type"] if step else None for step in steps]
    if kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space"):
        cuts = steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and cuts:
            return _GPT2
        if kinds == ["Digits", "ByteLevel"] and cuts and steps[0].get("individual_digits"):
            return _SMOLLM
        if kinds == ["Split", "ByteLevel"] and not cuts and steps[0]["behavior"] == "Isolated" and not steps[0].get("invert"):
            pattern = steps[0]["pattern"]["Regex"]
            if left := _left_out(pattern):
                raise ValueError(
                    f"The pre-tokenizer's pattern {pattern!r} leaves out {left!r}; only patterns that cut all text can be used."
                )
            return pattern
    raise ValueError(f"The pre-tokenizer {pre!r} is not implemented; supported are those of GPT-2, SmolLM2, Llama 3 and Qwen.")


def _left_out(pattern: str) -> str:
    """What a cutting pattern matches nowhere in a text of every kind of character; tiktoken would drop it silently."""
    try:
        return regex.sub(pattern, "", "Words don't 12 ½ _x+y?! \t \n\r\n  é e\u0301 ж 漢字 🦜\u200d🦜 \u00a0\x00\ue000 ")
    except regex.error as error:
        raise ValueError(f"The pre-tokenizer's pattern {pattern!r} is not a regular expression ({error}).") from error


def _hf_prefix(post: dict[str, Any] | None, special: dict[str, int]) -> list[int]:
    """Ids that the post-processor puts before every text (Llama 3's <|begin_of_text|>)."""
    steps = post["processors"] if post and post["type"] == "Sequence" else [post] if post else []
    ids = []
    for step in steps:
        if step["type"] == "TemplateProcessing":
            single = step["single"]
            if not single or "Sequence" not in single[-1]:
                raise ValueError("A post-processor that appends tokens to every text is not implemented.")
            ids += [special[part["SpecialToken"]["id"]] for part in single[:-1]]
        elif step["type"] != "ByteLevel":
            raise ValueError(f"The post-processor {step['type']!r} is not implemented.")
    return ids


def _hf_stop_ids(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: a number, a list, or nothing."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name, missing_ok=True).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int for i in ids):
                raise ValueError(f"{folder / name} has eos_token_id = {value!r}; expected a whole number or a list of them.")
            return list(ids)
    return []


def _render(template: str, messages: Sequence[dict[str, str]], tokens: dict[str, str]) -> str:
    """Run a chat template (a Jinja program from somebody else's file) in Jinja's sandbox."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ValueError(f"The chat template refuses these messages: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    try:
        # tools and documents as in transformers: templates ask whether they are none.
        return environment.from_string(template).render(
            messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **tokens
        )
    except ValueError:
        raise
    except Exception as error:  # Jinja's own kinds, and whatever an expression raises: TypeError, ZeroDivisionError, …
        raise ValueError(f"The checkpoint's chat template failed: {error}.") from error
