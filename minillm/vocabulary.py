"""A byte-level BPE vocabulary, checked and put into the form that `tiktoken` merges.

A checkpoint lists the pairs that may merge, first to last (Sennrich et al. 2016, algorithm 1). The
earliest pair in the list goes first, the leftmost of equal ones. tiktoken has no list: it joins the
neighbours whose union has the smallest id, and looks whole words up before it merges at all.

The two agree if tiktoken knows only tokens that the list can make, in the order of their ids. What
happens inside a token's text doesn't depend on the text around it, as long as nothing merges across
its ends. So a token can be made if and only if its own text, alone, becomes that token; and the two
parts that it's made of last are then always the same. Two neighbours whose union is such a token
are therefore these two parts, which are in the list.
"""

from collections.abc import Sequence

from minillm.tools.checks import brief

_LONGEST = 1000
"""Characters of a token that `_check_whole_words` takes apart; published ones have up to 256."""

Pair = tuple[str, str]


class _Made:
    """How each token comes out of the merges.

    at: token -> the place in the list of the merge that makes it, -1 for a single byte. parts: the
    two tokens that it's made of last. ValueError for merges that cannot be followed.
    """

    def __init__(self, vocab: dict[str, int], merges: Sequence[Pair]):
        self.place = {pair: i for i, pair in enumerate(merges)}  # the last, if it's there twice
        self.at = {text: -1 for text in vocab if len(text) == 1}
        self.parts: dict[str, Pair] = {}
        early = []
        for i, pair in enumerate(merges):
            left, right = pair
            union = left + right
            if union not in vocab or left not in vocab or right not in vocab:
                raise ValueError(
                    f"The merge {brief(left)} + {brief(right)} names a token that is not in the "
                    "vocabulary."
                )
            if union in self.at or self.place[pair] != i:
                continue
            if left not in self.at or right not in self.at:
                early.append(pair)  # never applied, unless a later merge makes its parts
            elif self.meet(left, right):
                self.at[union] = i
                self.parts[union] = pair
        for left, right in early:
            known = left in self.at and right in self.at and left + right not in self.at
            if known and self.meet(left, right):
                raise _out_of_order(left, right, "before the merges that make its parts")

    def meet(self, left: str, right: str) -> bool:
        """Whether the text of both, one after the other, becomes exactly these two tokens.

        Backwards from the two: undo the later of the merges that made them, and see whether the
        neighbours from before it would rather have merged across the border.
        """
        at, parts, place = self.at, self.parts, self.place
        while True:
            if at[left] > at[right]:
                limit = at[left]  # of equal pairs, this one stands further left and goes first
                left = parts[left][1]
            elif at[right] >= 0:
                limit = at[right] + 1
                right = parts[right][0]
            else:
                return True
            if place.get((left, right), limit) < limit:
                return False


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: 'Ġ' is the space, 'Ċ' the newline."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def spelled(vocab: dict[str, int], special: dict[str, int]) -> dict[str, bytes]:
    """The bytes of each token: "Ġthe" -> b" the". Control tokens may hold any characters.

    ValueError for ids that are not usable and for tokens outside the byte alphabet.
    """
    alphabet = byte_alphabet()
    spelling: dict[str, bytes] = {}
    for text, i in vocab.items():
        try:
            spelling[text] = bytes(alphabet[c] for c in text)
        except KeyError as error:
            if text not in special:
                raise ValueError(
                    f"Token {i} ({brief(text)}) is not in GPT-2's byte alphabet; only byte-level "
                    "BPE can be read."
                ) from error
    # Each token has one id, and each id one token.
    every = vocab | special
    bad = next((i for i in every.values() if not 0 <= i < 1 << 31), None)
    if bad is not None:
        raise ValueError(f"The vocabulary has the id {brief(bad)}; ids are from 0 to 2**31 - 1.")
    if len(set(every.values())) != len(every) or any(
        vocab.get(text, i) != i for text, i in special.items()
    ):
        raise ValueError(
            "Two tokens of this vocabulary share an id, or one has two ids; each needs its own."
        )
    return spelling


def mergeable(
    vocab: dict[str, int],
    merges: Sequence[Pair],
    special: dict[str, int],
    *,
    ignore_merges: bool = False,
) -> list[str]:
    """The tokens that tiktoken must know, so that it merges as the list does.

    A token that no merges make never comes out of a text, so it's left out: unless whole words are
    looked up before merging (ignore_merges). ValueError for merges whose order or tokens tiktoken
    cannot follow.
    """
    if not merges and len(vocab) > 256 + len(special):
        raise ValueError(
            f"{len(vocab)} tokens but only 0 merges: this is not a byte-level BPE vocabulary."
        )
    made = _Made(vocab, merges)
    last = -1
    for text, pair in made.parts.items():
        if vocab[text] < last:
            raise _out_of_order(*pair, "out of the order of token ids")
        last = vocab[text]
    if not ignore_merges:
        return list(made.at)
    # What a text cannot hold, as control tokens are cut out of it first, is no word.
    words = [text for text in vocab if text not in made.at and text not in special]
    _check_whole_words(words, made)
    return [*made.at, *words]


def _out_of_order(left: str, right: str, how: str) -> ValueError:
    return ValueError(
        f"The merge {brief(left)} + {brief(right)} comes {how}; this vocabulary cannot be read."
    )


def _check_whole_words(words: Sequence[str], made: _Made) -> None:
    """Raise ValueError if tiktoken would make one of these tokens inside of longer words.

    They stand for whole words only: no merges make them. tiktoken makes one wherever two tokens
    meet whose union it is.
    """
    if words and len(made.at) - len(made.parts) < 256:
        raise ValueError(
            f"The token {brief(words[0])} stands for whole words only (ignore_merges), in a "
            "vocabulary that lacks single bytes; this cannot be read."
        )
    for text in words:
        if len(text) > _LONGEST:
            raise ValueError(
                f"The token {brief(text)} has {len(text)} characters and no merges; at most "
                f"{_LONGEST} are supported."
            )
        for i in range(1, len(text)):
            left, right = text[:i], text[i:]
            if left in made.at and right in made.at and made.meet(left, right):
                raise ValueError(
                    f"The tokens {brief(left)} and {brief(right)} would become {brief(text)}, "
                    "though no merge says so; this vocabulary cannot be read."
                )
