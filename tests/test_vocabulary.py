"""Merges: whatever the list, the same ids as the tokenizers library, or a refusal at load."""

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from test_hostile import folder
from test_tokenizer import SMALL, folder_with, gguf_fields, train
from tokenizers import models, pre_tokenizers, trainers

from minillm import Tokenizer, load
from minillm.vocabulary import byte_alphabet
from minillm.weights.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

BYTES = {c: b for c, b in byte_alphabet().items()}
WORD = r" ?\p{L}+|[^\p{L}]"

Pairs = list[tuple[str, str]]


def pairs(text: str) -> Pairs:
    """ "x+yz" -> [("x", "yz")]."""
    return [tuple(pair.split("+")) for pair in text.split()]


def with_ids(merges: Pairs, extra: tuple[str, ...] = ()) -> dict[str, int]:
    vocab = dict(BYTES)
    for text in [*(a + b for a, b in merges), *extra]:
        vocab.setdefault(text, len(vocab))
    return vocab


def ours(vocab: dict[str, int], merges: Pairs, ignore_merges: bool = False) -> Tokenizer:
    return Tokenizer(vocab, merges, special={}, pattern=WORD, ignore_merges=ignore_merges)


def theirs(vocab: dict[str, int], merges: Pairs, ignore_merges: bool = False) -> Any:
    hf = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(tokenizers.Regex(WORD), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return hf


def same(vocab: dict[str, int], merges: Pairs, text: str, ignore_merges: bool = False) -> list[int]:
    ids = ours(vocab, merges, ignore_merges).encode(text)
    assert ids == theirs(vocab, merges, ignore_merges).encode(text).ids
    return ids


def test_a_token_that_its_own_merges_never_reach() -> None:
    """The pair e+n goes first and takes what t+e would have needed."""
    merges = pairs("e+n t+e te+n")
    vocab = with_ids(merges)
    assert same(vocab, merges, "ten") == [ord("t"), vocab["en"]]
    # It's still a token: its id has a text.
    assert ours(vocab, merges).decode([vocab["ten"]]) == "ten"


def test_a_whole_word_is_looked_up_first_if_the_file_says_so() -> None:
    merges = pairs("e+n s+t t+e")
    vocab = with_ids(merges, ("oste", "neo"))
    for ignore_merges in (False, True):
        for text in ("oste", "xoste", "neo neos", "steen", " oste"):
            same(vocab, merges, text, ignore_merges)
    assert ours(vocab, merges, True).encode("neo") == [vocab["neo"]]
    assert ours(vocab, merges).encode("neo") == list(b"neo")


@pytest.mark.parametrize(
    ("merges", "extra", "ignore_merges", "words"),
    [
        ("e+n t+e te+n", (), True, "'t' and 'en' would become 'ten', though no merge says so"),
        ("t+e te+n", ("st",), True, "'s' and 't' would become 'st', though no merge says so"),
        ("ab+c a+b", (), False, r"'ab' \+ 'c' comes before the merges that make its parts"),
        ("", ("st",), False, "257 tokens but only 0 merges"),
        ("a+b", ("s" * 2000,), True, "has 2000 characters and no merges; at most 1000"),
    ],
)
def test_merges_that_tiktoken_would_do_otherwise(
    merges: str, extra: tuple[str, ...], ignore_merges: bool, words: str
) -> None:
    listed = pairs(merges)
    with pytest.raises(ValueError, match=words):
        ours(with_ids(listed, extra), listed, ignore_merges)


def test_an_order_that_is_not_that_of_the_ids() -> None:
    merges = pairs("a+b c+d")
    with pytest.raises(ValueError, match=r"'c' \+ 'd' comes out of the order of token ids"):
        ours(BYTES | {"ab": 300, "cd": 299}, merges)
    same(BYTES | {"ab": 299, "cd": 300}, merges, "abcdab")


def test_a_pair_listed_late_that_no_text_reaches() -> None:
    """The union has an early id; but its other pair always gets there first."""
    merges = pairs("i+n in+g n+g i+ng")
    vocab = with_ids(merges)
    for text in ("ing", "ng", "inging", "nging", "iing"):
        same(vocab, merges, text)


def test_a_pair_listed_twice_counts_where_it_stands_last() -> None:
    merges = pairs("a+b b+c a+b")
    vocab = BYTES | {"bc": 256, "ab": 257}
    assert same(vocab, merges, "abc") == [ord("a"), 256]


def test_equal_letters_merge_from_the_left() -> None:
    merges = pairs("a+a aa+a aa+aa aaa+aaa")
    vocab = with_ids(merges)
    for n in (*range(1, 40), 99, 100, 101, 257):
        same(vocab, merges, "a" * n)


def random_vocabulary(rng: random.Random) -> tuple[str, dict[str, int], Pairs]:
    """A few letters, tokens made of them, and a list of merges with one kind of disorder."""
    letters = "abcd"[: rng.randint(2, 4)]
    merges: Pairs = []
    tokens = list(letters)
    for _ in range(rng.randint(2, 14)):
        pair = rng.choice(tokens), rng.choice(tokens)
        if len("".join(pair)) <= 8 and pair not in merges:
            merges.append(pair)
            tokens += {"".join(pair)} - set(tokens)
    vocab = with_ids(merges)
    disorder = rng.randrange(5)
    if disorder == 1:
        rng.shuffle(merges)
    elif disorder == 2:  # all pairs of a token together, as converters write them
        cuts = [(text[:i], text[i:]) for text in tokens for i in range(1, len(text))]
        merges = [(a, b) for a, b in cuts if a in vocab and b in vocab]
    elif disorder == 3:  # one merge elsewhere
        merges.insert(rng.randrange(len(merges) + 1), merges.pop())
    elif disorder == 4:  # a token without a merge
        vocab.setdefault("".join(rng.choices(letters, k=rng.randint(2, 5))), len(vocab))
    if rng.random() < 0.2:  # one of the bytes is missing
        gone = rng.choice((letters[-1], "z"))
        vocab = {text: i for text, i in vocab.items() if gone not in text}
        merges = [pair for pair in merges if gone not in "".join(pair)]
    return letters, vocab, merges


@pytest.mark.parametrize("seed", range(4))
def test_random_vocabularies(seed: int) -> None:
    """Whatever is not refused gives the same ids, for every text."""
    rng, read = random.Random(seed), 0
    for _ in range(25):
        letters, vocab, merges = random_vocabulary(rng)
        ignore_merges = rng.random() < 0.5
        try:
            tokenizer = ours(vocab, merges, ignore_merges)
        except ValueError:
            continue
        read += 1
        hf = theirs(vocab, merges, ignore_merges)
        for _ in range(20):
            text = "".join(rng.choices(letters + "z ", k=rng.randint(1, 14)))
            assert tokenizer.encode(text) == hf.encode(text).ids, (text, merges, ignore_merges)
    assert read >= 10


@pytest.mark.parametrize(("pre", "looked_up"), [("llama-bpe", True), ("gpt-2", False)])
def test_gguf_files_look_words_up_where_llama_cpp_does(pre: str, looked_up: bool) -> None:
    fields = gguf_fields() | {"tokenizer.ggml.pre": pre}
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "qxqzq"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    del fields["tokenizer.ggml.bos_token_id"]
    tokenizer = tokenizer_from_gguf(fields)
    assert (tokenizer.encode("qxqzq") == [280]) is looked_up
    assert tokenizer.decode([280]) == "qxqzq"


def test_the_file_says_whether_words_are_looked_up(tmp_path: Path) -> None:
    for ignore_merges in (True, False):
        hf = tokenizers.Tokenizer(
            models.BPE(with_ids(pairs("o+n"), ("zzzq",)), pairs("o+n"), ignore_merges=ignore_merges)
        )
        hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        hf.save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokenizer_from_folder(tmp_path)
        assert tokenizer.encode("zzzq on") == hf.encode("zzzq on").ids
        assert (len(tokenizer.encode("zzzq")) == 1) is ignore_merges


@pytest.mark.parametrize("fuse_unk", [False, True])
def test_unknown_bytes(tmp_path: Path, fuse_unk: bool) -> None:
    """Trained without the byte alphabet: with an unk_token refused, else the bytes are dropped."""
    for unk_token in ("[UNK]", None):
        hf = tokenizers.Tokenizer(models.BPE(unk_token=unk_token, fuse_unk=fuse_unk))
        hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
        hf.train_from_iterator(["some plain words and more of them"], trainer)
        hf.save(str(tmp_path / "tokenizer.json"))
        if unk_token:
            with pytest.raises(ValueError, match=r"unk_token '\[UNK\]' stands for bytes that"):
                tokenizer_from_folder(tmp_path)
        else:
            text = "fine words, über all"
            assert tokenizer_from_folder(tmp_path).encode(text) == hf.encode(text).ids


def test_an_unk_token_is_of_no_effect_where_no_byte_is_missing(tmp_path: Path) -> None:
    hf = train("gpt2", n_vocab=300)
    hf.model.unk_token = "<|end|>"
    hf.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_folder(tmp_path).encode("é xyz") == hf.encode("é xyz").ids


# Ids that the model has and the vocabulary lacks


def test_ids_between_the_vocabulary_and_the_models_rows_spell_nothing(tmp_path: Path) -> None:
    hf = train("gpt2", n_vocab=280)
    hf.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    ids = [*tokenizer.encode("one é"), 280, 319, *tokenizer.encode(" two")]
    with pytest.raises(ValueError, match="280 is not a token id; this vocabulary has ids 0 to 279"):
        tokenizer.decode(ids)
    tokenizer.n_rows = 320
    assert tokenizer.decode(ids) == hf.decode(ids) == "one é two"
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == "one é two"
    assert tokenizer.token_bytes(319) == b"" and len(SMALL["model"]["vocab"]) == 280
    with pytest.raises(ValueError, match="320 is not a token id; this vocabulary has ids 0 to 319"):
        tokenizer.decode([320])


def test_a_padded_id_does_not_spell_a_byte_that_the_vocabulary_lacks() -> None:
    vocab = {c: b for c, b in BYTES.items() if b != ord("~")}
    tokenizer = ours(vocab, [])
    tokenizer.n_rows = 1000
    assert tokenizer.decode([97, *range(256, 1000), 98]) == "ab"
    assert tokenizer.encode("a~b") == [97, 98]


def test_load_tells_the_tokenizer_how_many_rows_the_model_has(tmp_path: Path) -> None:
    _, tokenizer = load(folder_with(folder(tmp_path / "m", vocab_size=300), SMALL), device="cpu")
    assert (tokenizer.n_vocab, tokenizer.n_rows) == (280, 300)
    assert tokenizer.decode([299]) == ""
