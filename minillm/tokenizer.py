"""Text to token ids and back, with the vocabulary that came with the checkpoint.

A byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in Radford et al. 2019, section 2.2) is
three things: a regular expression that splits text into words, a list of byte strings, and the
order in which neighbours merge. `minillm.weights` reads them from a checkpoint; here they are
handed to `tiktoken`, which does the work. It merges in the order of token ids, so a vocabulary
whose merges come in another order is refused.
Ids equal those of Hugging Face's tokenizers on the same file.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import regex  # a dependency of tiktoken, with the syntax of its patterns
import tiktoken

from minillm.tools.chat_template import render
from minillm.tools.checks import brief

SAMPLE = "Words don't 12 ½ _x+y?! \t \n\r\n  é e\u0301 ж 漢字 🦜\u200d🦜 \u00a0\x00\ue000 0000x"
"""Characters of every kind, to try patterns on."""

_MAX_SPECIAL, _MAX_SPECIAL_LENGTH = 20_000, 300_000
"""Control tokens, and their characters together, far above any published vocabulary.

All of them are searched for at every position of a text.
"""

_UNUSABLE = "tiktoken cannot use this vocabulary or pattern"


class Tokenizer:
    """Encode, decode and chat in a checkpoint's own vocabulary.

    stop_ids: ids that end an answer. special: text -> id of the control tokens, which are matched
    before anything else. encoding: the `tiktoken.Encoding` that does the work. Raises ValueError
    for a vocabulary, pattern or template that cannot be used.
    """

    def __init__(
        self,
        vocab: dict[str, int],  # token in GPT-2's byte alphabet -> id
        merges: Sequence[tuple[str, str]],  # in their order
        *,
        special: dict[str, int],
        pattern: str,  # of one word
        stop_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),  # put before every text by `encode`
        chat_template: str | None = None,
        chat_tokens: dict[str, str] | None = None,  # "bos_token" -> its text, for the template
        nfc: bool = False,  # normalize text to Unicode's NFC first
        name: str = "custom",
    ):
        # The vocabulary as tiktoken takes it
        _check_control_tokens(special)
        ranks = _ranks(vocab, special)
        _check_merge_order(vocab, merges, ranks)
        self.special = dict(special)
        self.n_vocab = 1 + max([*ranks.values(), *special.values()], default=-1)
        # tiktoken needs every byte. A byte that the vocabulary lacks gets an id past its end, and
        # is dropped from the text, as Hugging Face's BPE drops a character that it does not know.
        self._missing = {byte for byte in range(256) if bytes([byte]) not in ranks}
        ranks |= {bytes([byte]): self.n_vocab + byte for byte in self._missing}

        # What comes before and after a text, and around the messages of a chat
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self._prefix = list(prefix_ids)
        _check_ids((*self.stop_ids, *self._prefix), self.n_vocab)
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(
                f"The chat template is a {type(chat_template).__name__}; it must be a string."
            )
        self.chat_template = chat_template
        self._chat_tokens = chat_tokens or {}

        # How text is split: control tokens first, then words
        self._nfc = nfc
        self._control = _any_of(special)
        self.encoding = _encoding(name, pattern, ranks, self.special)
        with _as_value_error(_UNUSABLE):
            self._word = regex.compile(pattern) if self._missing else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`.

        Control tokens spelled out in the text become their single id, as in Hugging Face.
        """
        return self._prefix + self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"encode needs a string, not {type(text).__name__}.")
        ids: list[int] = []
        # Texts and the control tokens between them, in turn
        for part in self._control.split(text) if self._control else [text]:
            if part in self.special:
                ids.append(self.special[part])
            elif part:
                part = unicodedata.normalize("NFC", part) if self._nfc else part
                ids += self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        """Ids of text in which control tokens are not searched for."""
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, from JSON or a file name
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            utf8 = text.encode()
        # tiktoken cannot split about 10⁶ spaces in a row.
        with _as_value_error("tiktoken cannot split this text into words; give it in parts"):
            if self._missing.isdisjoint(utf8):
                # Not encode_ordinary, which panics where this raises ValueError
                return self.encoding.encode(text, disallowed_special=())
            # Bytes are dropped inside each word before merging: their neighbours may merge.
            pieces = (match[0].encode() for match in self._word.finditer(text))
            words = (bytes(b for b in piece if b not in self._missing) for piece in pieces)
            return [i for word in words if word for i in self.encoding._encode_single_piece(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, control tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, i: int) -> bytes:
        """The bytes of one token, b"" for an id that the vocabulary leaves unused.

        ValueError for an id outside the vocabulary.
        """
        if not 0 <= i < self.n_vocab:
            raise ValueError(
                f"{brief(i)} is not a token id; this vocabulary has ids 0 to {self.n_vocab - 1}."
            )
        try:
            return self.encoding.decode_single_token_bytes(i)
        except KeyError:
            return b""

    def stream(self) -> "StreamDecoder":
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the checkpoint's chat template.

        They end where the assistant's answer begins. messages: dicts of "role" ("user", "system"
        or "assistant") and "content", a string.
        """
        if self.chat_template is None:
            raise ValueError(
                "This checkpoint has no chat template; encode the text yourself, or load an "
                "instruct model."
            )
        for message in messages:
            is_dict = isinstance(message, dict)
            if not is_dict or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ValueError(
                    f"{brief(message)} is not a message; give dicts with the strings 'role' and "
                    "'content'."
                )
        if not messages:
            raise ValueError("messages is empty; give at least one.")
        # No prefix: the template writes its own control tokens.
        return self._encode(render(self.chat_template, messages, self._chat_tokens))


class StreamDecoder:
    """Ids in, text out, never half a character: bytes wait until a UTF-8 sequence is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, i: int) -> str:
        """Text that became complete with token `i`; may be empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(i))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)


@contextmanager
def _as_value_error(what: str) -> Iterator[None]:
    """Turn whatever tiktoken raises into a ValueError.

    A panic of its Rust code is a `BaseException` but not an `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} ({brief(str(error), 300)}).") from error


def _encoding(
    name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]
) -> tiktoken.Encoding:
    with _as_value_error(_UNUSABLE):
        encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        sample = encoding.decode(encoding.encode(SAMPLE, disallowed_special=()))
    if sample != SAMPLE:  # tiktoken drops what the pattern does not match
        raise ValueError(
            f"The pattern {brief(pattern)} leaves out parts of a text; only patterns that match "
            "all of it can be used."
        )
    return encoding


def _any_of(special: dict[str, int]) -> re.Pattern[str] | None:
    """A pattern that finds the control tokens; None if there are none."""
    # Longest first, so that a control token that begins like another is not cut short.
    by_length = sorted(filter(None, special), key=len, reverse=True)
    either = "|".join(map(re.escape, by_length))
    # In parentheses, so that `split` keeps the tokens
    return re.compile(f"({either})") if by_length else None


def _check_control_tokens(special: dict[str, int]) -> None:
    length = sum(map(len, special))
    if len(special) > _MAX_SPECIAL or length > _MAX_SPECIAL_LENGTH:
        raise ValueError(
            f"The vocabulary has {len(special)} control tokens; at most {_MAX_SPECIAL} are "
            f"supported, of {_MAX_SPECIAL_LENGTH} characters together."
        )


def _check_ids(ids: Iterable[int], n_vocab: int) -> None:
    for i in ids:
        if not 0 <= i < n_vocab:
            raise ValueError(
                f"The stop or prefix id {brief(i)} is outside the vocabulary of {n_vocab} tokens."
            )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: 'Ġ' is the space, 'Ċ' the newline."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _ranks(vocab: dict[str, int], special: dict[str, int]) -> dict[bytes, int]:
    """The vocabulary's tokens as bytes, without the control tokens."""
    alphabet = _byte_alphabet()
    ranks: dict[bytes, int] = {}
    # "Ġthe" -> b" the"
    for text, i in vocab.items():
        if text in special:
            continue
        try:
            ranks[bytes(alphabet[c] for c in text)] = i
        except KeyError as error:
            raise ValueError(
                f"Token {i} ({brief(text)}) is not in GPT-2's byte alphabet; only byte-level BPE "
                "can be read."
            ) from error
    # Each token has one id, and each id one token.
    ids = [*ranks.values(), *special.values()]
    bad = next((i for i in ids if not 0 <= i < 1 << 31), None)
    if bad is not None:
        raise ValueError(f"The vocabulary has the id {brief(bad)}; ids are from 0 to 2**31 - 1.")
    if len(set(ids)) != len(ids) or any(vocab.get(text, i) != i for text, i in special.items()):
        raise ValueError(
            "Two tokens of this vocabulary share an id, or one has two ids; each needs its own."
        )
    return ranks


def _check_merge_order(
    vocab: dict[str, int], merges: Sequence[tuple[str, str]], ranks: dict[bytes, int]
) -> None:
    """Raise ValueError unless the merges come in the order of the ids that they produce.

    tiktoken has no list of merges: it joins the neighbours whose union has the smallest id.
    """
    last, merged = -1, set()
    for left, right in merges:
        i = vocab.get(left + right)
        if i is None or left not in vocab or right not in vocab:
            raise ValueError(
                f"The merge {brief(left)} + {brief(right)} names a token that is not in the "
                "vocabulary."
            )
        if i in merged:
            continue  # a second way to make the same token
        if i < last:
            raise ValueError(
                f"The merge {brief(left)} + {brief(right)} comes out of the order of token ids; "
                "this vocabulary cannot be read."
            )
        last = i
        merged.add(i)
    # Every token but the single bytes comes from a merge.
    if len(merged) + 256 < len(ranks):
        raise ValueError(
            f"{len(ranks)} tokens but only {len(merged)} merges: this is not a byte-level BPE "
            "vocabulary."
        )
