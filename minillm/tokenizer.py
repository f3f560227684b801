"""Text to token ids and back, with the vocabulary that came with the checkpoint.

A byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in Radford et al. 2019, section 2.2) is
three things: a regular expression that splits text into words, a list of byte strings, and the
order in which neighbours merge. `minillm.weights` reads them from a checkpoint; here they are
handed to `tiktoken`, which does the work. It merges in the order of token ids, so a vocabulary
whose merges come in another order is refused (`minillm.vocabulary`).
Ids equal those of Hugging Face's tokenizers on the same file.
"""

import codecs
import operator
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import regex  # a dependency of tiktoken, with the syntax of its patterns
import tiktoken

from minillm.tools.chat_template import Renderer
from minillm.tools.checks import brief
from minillm.vocabulary import mergeable, spelled

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
    before anything else. encoding: the `tiktoken.Encoding` that does the work. n_vocab: the last id
    + 1. n_rows: the same for the model, whose matrices are often padded to a round number; `load`
    sets it. Raises ValueError for a vocabulary, pattern or template that cannot be used.
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
        chat_template: str | dict[str, str] | None = None,  # several by name: "default" is used
        chat_tokens: dict[str, str] | None = None,  # "bos_token" -> its text, for the template
        nfc: bool = False,  # normalize text to Unicode's NFC first
        ignore_merges: bool = False,  # a word that is a token is not merged
        name: str = "custom",
    ):
        # The vocabulary as tiktoken takes it
        _check_control_tokens(special)
        spelling = spelled(vocab, special)
        known = mergeable(vocab, merges, special, ignore_merges=ignore_merges)
        ranks = {spelling[text]: vocab[text] for text in known}
        self.special = dict(special)
        self.n_vocab = 1 + max([*vocab.values(), *special.values()], default=-1)
        self.n_rows = self.n_vocab
        # tiktoken needs every byte. A byte that the vocabulary lacks gets an id past its end, and
        # is dropped from the text, as Hugging Face's BPE drops a character that it does not know.
        self._missing = {byte for byte in range(256) if bytes([byte]) not in ranks}
        ranks |= {bytes([byte]): self.n_vocab + byte for byte in self._missing}

        # What comes before and after a text, and around the messages of a chat
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self._prefix = list(prefix_ids)
        _check_ids((*self.stop_ids, *self._prefix), self.n_vocab)
        self._template_names = list(chat_template) if isinstance(chat_template, dict) else []
        if isinstance(chat_template, dict):
            chat_template = chat_template.get("default")
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(
                f"The chat template is a {type(chat_template).__name__}; it must be a string."
            )
        self.chat_template = chat_template
        self._renderer = Renderer(chat_template or "", chat_tokens or {})

        # How text is split: control tokens first, then words
        self._nfc = nfc
        self._control = _any_of(special)
        self.encoding = _encoding(name, pattern, ranks, self.special)
        self._bytes = {vocab[text]: utf8 for text, utf8 in spelling.items()}
        self._bytes |= {i: text.encode() for text, i in special.items()}
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
        """The bytes of one token, b"" for an id that no token has.

        A model has such ids where its matrices are padded, and may choose one, if rarely.
        ValueError for an id that the model does not have either.
        """
        if not 0 <= i < self.n_rows:
            raise ValueError(
                f"{brief(i)} is not a token id; this vocabulary has ids 0 to {self.n_rows - 1}."
            )
        return self._bytes.get(operator.index(i), b"")

    def stream(self) -> "StreamDecoder":
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the checkpoint's chat template.

        They end where the assistant's answer begins. messages: dicts of "role" ("user", "system"
        or "assistant") and "content", a string.
        """
        if self.chat_template is None and self._template_names:
            raise ValueError(
                f"This checkpoint's chat templates are named {brief(self._template_names)}, and "
                "none is the default; write the one to use into the folder's chat_template.jinja."
            )
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
        return self._encode(self._renderer.render(messages))


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
