"""Tokenizer against the tokenizers library: the same ids for any text, or one sentence."""

import copy
import inspect
import json
import textwrap
import unicodedata
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.utils.chat_template_utils import render_jinja_template

from minillm import Tokenizer
from minillm.bench.peers import tokenizers_twin
from minillm.tools.chat_template import Renderer
from minillm.weights.default import fetch_default
from minillm.weights.files import read_json
from minillm.weights.gguf_header import read_gguf
from minillm.weights.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

CORPUS = "\n".join(topics.topics.values())
# As published in the tokenizer.json of Llama 3 and of Qwen2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STYLES = ("gpt2", "smollm", "llama3", "qwen2")
SPECIAL = ["<|begin|>", "<|end|>", "<|end|>er"]

TEXTS = [
    "",
    CORPUS[5000:8000],
    inspect.getsource(textwrap),
    "3.14159 12345 1,000,000 x2y 0x1F ²³½ Ⅷ ١٢٣ 1e-9",
    "I'm you're HE'LL We'Ve o'clock 'tis rock'n'roll '' 's'S'ſ can’t",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 é 😀a😀1",
    "日本語のテキスト。中文，漢字！한국어 텍스트",
    "العربية مرحبا ١٢٣ עברית हिन्दी ไทย",
    "e\u0301 é a\u0308\u0323 n\u0303o \u0301 ﬁ Å Å Ω",
    "a  b   c    1     2      \t3\t\t4 \n\n5\n 6 \r\n\r\n 7\r8  ",
    "   \n\t  x\u00a0y\u2003\u3000z\u200b\ufeff   ",
    "<|begin|>user\n<|end|>ers <|end|> <|end|<|begin|><|begin|>",
    "<|im_start|>user\nhi<|im_end|><|endoftext|> <|im_start>",
    "".join(map(chr, range(32))) + "\x7f\x80\x85\x9f",
    "_a_ __init__ {}[]()!!!??? --- ### ``` \\ \\n $%&/",
]
# Fragments that the splitting patterns treat differently next to each other; random strings of them
# find more than random characters.
FRAGMENTS = [
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "a",
    "Zé",
    "e\u0301",
    "1",
    "42",
    "٣",
    "'s",
    "'LL",
    "'",
    ".",
    "!?",
    "中",
    "👩‍👧",
    "🇩🇪",
]
ANY_TEXT = st.text(max_size=40) | st.lists(st.sampled_from(FRAGMENTS + SPECIAL), max_size=20).map(
    "".join
)
few = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def train(style: str, n_vocab: int = 900) -> tokenizers.Tokenizer:
    """A small vocabulary with the pre-tokenizer of a published family."""
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=style in ("gpt2", "smollm")
    )
    before = {
        "gpt2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated")],
    }[style]
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level]) if before else byte_level
    hf.decoder = decoders.ByteLevel()
    if style == "qwen2":
        hf.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hf.train_from_iterator([CORPUS[:200_000]], trainer)
    if style == "llama3":
        template = processors.TemplateProcessing(
            single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", 0)]
        )
        hf.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return hf


@pytest.fixture(scope="module")
def pairs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """(ours, theirs) from the same tokenizer.json in every style.

    And the default checkpoint's, from its GGUF file.
    """
    both = {}
    for style in STYLES:
        hf, folder = train(style), tmp_path_factory.mktemp(style)
        hf.save(str(folder / "tokenizer.json"))
        both[style] = tokenizer_from_folder(folder), hf
    fields, _ = read_gguf(fetch_default())
    both["default"] = tokenizer_from_gguf(fields), tokenizers_twin(fields)
    return both


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("style", [*STYLES, "default"])
def test_ids_equal_the_tokenizers_library(pairs: dict[str, Any], style: str, text: str) -> None:
    ours, theirs = pairs[style]
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    if style in ("gpt2", "smollm"):
        assert ours.decode(ids) == text


@pytest.mark.parametrize("style", [*STYLES, "default"])
@few
@given(text=ANY_TEXT)
def test_ids_equal_for_any_text(pairs: dict[str, Any], style: str, text: str) -> None:
    ours, theirs = pairs[style]
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    if style in ("gpt2", "smollm"):
        assert ours.decode(ids) == text
    elif style == "qwen2":
        assert unicodedata.normalize("NFC", ours.decode(ids)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("style", STYLES)
def test_ids_equal_for_every_character(pairs: dict[str, Any], style: str) -> None:
    ours, theirs = pairs[style]
    # Unicode 3.2 of 2002: every library's tables agree on what these are.
    characters = [
        c
        for c in map(chr, range(0x110000))
        if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")
    ]
    for first in range(0, len(characters), 1000):
        text = "".join(f"a{c}1{c}  {c}\n" for c in characters[first : first + 1000])
        assert ours.encode(text) == theirs.encode(text).ids, (
            f"between {characters[first]!a} and the next 1000"
        )


@pytest.mark.parametrize("style", [*STYLES, "default"])
@few
@given(data=st.data())
def test_decode_equals_for_any_ids(pairs: dict[str, Any], style: str, data: st.DataObject) -> None:
    ours, theirs = pairs[style]
    ids = data.draw(st.lists(st.integers(0, ours.n_vocab - 1), max_size=20))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    stream = ours.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == ours.decode(ids)


@few
@given(text=st.text(alphabet="\x04\x06\x1d\U00077000\U000e0067\x8e!a .1\n中\ud800", max_size=12))
def test_dropped_bytes_let_their_neighbours_merge(pairs: dict[str, Any], text: str) -> None:
    ours, theirs = pairs["default"]
    assert ours.encode(text) == theirs.encode(text.replace("\ud800", "\ufffd")).ids


def test_the_default_vocabulary_lacks_bytes_and_drops_them(pairs: dict[str, Any]) -> None:
    ours, theirs = pairs["default"]
    assert ours.n_vocab == 49152
    kept = {ours.token_bytes(i) for i in range(ours.n_vocab)}
    missing = [byte for byte in range(256) if bytes([byte]) not in kept]
    assert len(missing) == 21
    dropped = chr(missing[0])
    assert dropped.isascii() and ours.encode(f"a{dropped}b") == theirs.encode(
        f"a{dropped}b"
    ).ids == ours.encode("a") + ours.encode("b")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "text",
    [t for t in TEXTS[1:] if unicodedata.is_normalized("NFC", t)],
    ids=lambda t: ascii(t[:8]),
)
def test_stream_never_shows_half_a_character(pairs: dict[str, Any], style: str, text: str) -> None:
    ours, _ = pairs[style]
    stream, ids = ours.stream(), ours.encode(text)
    parts = [stream.push(i) for i in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + stream.flush() == ours.decode(ids)
    assert stream.flush() == ""


def test_stream_ends_an_unfinished_character_with_a_replacement(pairs: dict[str, Any]) -> None:
    ours, _ = pairs["gpt2"]
    ids, stream = ours.encode("👧"), ours.stream()
    assert len(ids) > 1
    assert [stream.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd"


def test_lone_surrogates_become_replacement_characters(pairs: dict[str, Any]) -> None:
    ours, _ = pairs["gpt2"]
    assert ours.decode(ours.encode("a\ud800b")) == "a\ufffdb"


def test_llama3_puts_its_first_token_before_any_text(pairs: dict[str, Any]) -> None:
    ours, _ = pairs["llama3"]
    assert ours.encode("")[:1] == [ours.special["<|begin|>"]]
    assert ours.encode("<|begin|>") == [0, 0]  # as in Hugging Face: the prefix, then the text's own


@pytest.mark.parametrize("i", [-1, 49152, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(pairs: dict[str, Any], i: int) -> None:
    ours, _ = pairs["default"]
    with pytest.raises(
        ValueError, match=f"{i} is not a token id; this vocabulary has ids 0 to 49151"
    ):
        ours.decode([5, i])
    with pytest.raises(ValueError, match="is not a token id"):
        ours.stream().push(i)


def test_encode_wants_a_string(pairs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="encode needs a string, not bytes"):
        pairs["gpt2"][0].encode(b"bytes")


def test_a_million_spaces_are_refused_not_a_crash(pairs: dict[str, Any]) -> None:
    ours, theirs = pairs["smollm"]
    assert ours.encode(" " * 100_000) == theirs.encode(" " * 100_000).ids
    with pytest.raises(ValueError, match="cannot split this text into words"):
        ours.encode(" " * 1_100_000)


# Chat templates

SMALL = json.loads(train("gpt2", n_vocab=280).to_str())  # 256 bytes, 3 special tokens, 21 merges
CHAT = [
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "1+1"},
]


def folder_with(folder: Path, raw: dict[str, Any], **others: object) -> Path:
    """A Hugging Face folder of a tokenizer.json and others: `config={…}` becomes config.json."""
    for name, value in {"tokenizer": raw, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def with_template(folder: Path, template: object, **settings: object) -> Tokenizer:
    return tokenizer_from_folder(
        folder_with(folder, SMALL, tokenizer_config={"chat_template": template} | settings)
    )


def test_the_default_chat_template(pairs: dict[str, Any]) -> None:
    ours, _ = pairs["default"]
    system = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n"
    )
    text = (
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ours.chat(CHAT) == ours.encode(system + text)
    assert ours.decode(ours.chat(CHAT)) == system + text
    brief = ours.chat([{"role": "system", "content": "Be brief."}, *CHAT])
    assert ours.decode(brief) == "<|im_start|>system\nBe brief.<|im_end|>\n" + text
    assert ours.stop_ids == (ours.special["<|endoftext|>"], ours.special["<|im_end|>"])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m['content'] | trim }}\n"
        "    {% endif %}\n{% endfor %}\n!",
        "{{ bos_token }}{%- for m in messages -%}{{ m | tojson }}{{ loop.index }}{% endfor %}"
        "{{ eos_token }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}{{ [1, 'é'] | tojson(indent=2) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ add_generation_prompt }}",
        "{% if tools is defined %}tools{% endif %}{{ tools }}{{ messages[0].tool_calls }}"
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}",
    ],
)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    ours = with_template(
        tmp_path, template, bos_token="<|begin|>", eos_token={"content": "<|end|>"}
    )
    theirs, _ = render_jinja_template(
        [CHAT],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<|begin|>",
        eos_token="<|end|>",
    )
    assert ours.decode(ours.chat(CHAT)) == theirs[0]


def test_a_template_file_wins_and_named_templates_work(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert with_template(tmp_path, named).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert with_template(tmp_path, named).chat_template == "from the file é"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ ''.__class__ }}{{ messages.__class__ }}",
    "{{ messages | attr('__class__') }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ cycler.__init__.__globals__ }}{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('false') }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(role='x') }}",
    "{% set x = messages[0].pop('role') %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% for x in range(1000000000) %}x{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_stay_in_the_sandbox(tmp_path: Path, template: str) -> None:
    messages = copy.deepcopy(CHAT)
    ours = with_template(tmp_path, template)
    try:
        text = ours.decode(ours.chat(messages))
    except ValueError as error:
        assert "template failed" in str(error)
    else:
        assert text.strip("[]") in ("", "Undefined")
    assert messages == CHAT


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% nonsense %}",
        "{{ messages[7].role }}",
    ],
)
def test_failing_templates_give_one_kind_of_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        with_template(tmp_path, template).chat(CHAT)


def test_a_template_can_refuse_the_messages(tmp_path: Path) -> None:
    ours = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: 'roles must alternate'"):
        ours.chat(CHAT)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        (["hi"], "'hi' is not a message"),
        ([{"role": "user"}], "is not a message"),
        ([{"role": "user", "content": None}], "is not a message"),
        ([{"role": 1, "content": "x"}], "is not a message"),
    ],
)
def test_chat_refuses_what_is_no_conversation(
    pairs: dict[str, Any], messages: list[Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        pairs["default"][0].chat(messages)


def test_chat_needs_a_template(pairs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        pairs["gpt2"][0].chat(CHAT)


# Files


def test_a_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "stop_ids"),
    [
        ({}, ()),
        ({"generation_config": {"eos_token_id": 7}}, (7,)),
        ({"generation_config": {"eos_token_id": [9, 7, 9]}, "config": {"eos_token_id": 3}}, (7, 9)),
        ({"generation_config": {}, "config": {"eos_token_id": 3}}, (3,)),
        (
            {
                "generation_config": {"eos_token_id": 7},
                "tokenizer_config": {"eos_token": "<|end|>"},
            },
            (1, 7),
        ),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, (1,)),
    ],
)
def test_stop_ids(tmp_path: Path, files: dict[str, Any], stop_ids: tuple[int, ...]) -> None:
    assert tokenizer_from_folder(folder_with(tmp_path, SMALL, **files)).stop_ids == stop_ids


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("2", "eos_token_id = '2'"),
        ([True], r"eos_token_id = \[True\]"),
        (-1, "id -1 is outside"),
        (300, "id 300 is outside"),
    ],
)
def test_wrong_stop_ids(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tokenizer_from_folder(
            folder_with(tmp_path, SMALL, generation_config={"eos_token_id": value})
        )


def put(value: object, *path: Any) -> Callable[[dict[str, Any]], None]:
    """A change of SMALL: `value` at `path`."""

    def change(raw: Any) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


def swap_merges(raw: dict[str, Any]) -> None:
    merges = raw["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]


SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("WordPiece", "model", "type"), "tokenizer model 'WordPiece' is not implemented"),
        (put("Unigram", "model", "type"), "tokenizer model 'Unigram' is not implemented"),
        (put(True, "model", "byte_fallback"), "has byte_fallback, as Llama 2's .* only byte-level"),
        (put(0.1, "model", "dropout"), "dropout 0.1 gives other ids each time; set it to null"),
        (
            put("##", "model", "continuing_subword_prefix"),
            "continuing_subword_prefix '##' is not implemented",
        ),
        (
            put("</w>", "model", "end_of_word_suffix"),
            "end_of_word_suffix '</w>' is not implemented",
        ),
        (put(True, "pre_tokenizer", "add_prefix_space"), "pre-tokenizer .* is not implemented"),
        (
            put({"type": "Whitespace"}, "pre_tokenizer"),
            "pre-tokenizer .*Whitespace.* is not implemented",
        ),
        (put(None, "pre_tokenizer"), "pre-tokenizer None is not implemented"),
        (
            put(
                {"type": "Sequence", "pretokenizers": [SPLIT | {"behavior": "Removed"}, BYTES]},
                "pre_tokenizer",
            ),
            "pre-tokenizer",
        ),
        (
            put(
                {"type": "Sequence", "pretokenizers": [SPLIT | {"invert": True}, BYTES]},
                "pre_tokenizer",
            ),
            "pre-tokenizer",
        ),
        (
            put(
                {
                    "type": "Sequence",
                    "pretokenizers": [SPLIT | {"pattern": {"Regex": "(["}}, BYTES],
                },
                "pre_tokenizer",
            ),
            "regular expression",
        ),
        (
            put(
                {
                    "type": "Sequence",
                    "pretokenizers": [SPLIT | {"pattern": {"Regex": r"\p{L}+"}}, BYTES],
                },
                "pre_tokenizer",
            ),
            "leaves out",
        ),
        (put({"type": "Lowercase"}, "normalizer"), "normalizer .*Lowercase.* is not implemented"),
        (
            put({"type": "BertProcessing"}, "post_processor"),
            "post-processor 'BertProcessing' is not implemented",
        ),
        (
            put(
                {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|end|>"}}]},
                "post_processor",
            ),
            "appends tokens",
        ),
        (put("Ġ zzz", "model", "merges", 0), "'zzz' names a token that is not in the vocabulary"),
        (put(["a"], "model", "merges", 0), r"merge \['a'\] is not a pair"),
        (put("a b c", "model", "merges", 0), "merge 'a b c' is not a pair"),
        (swap_merges, "comes before the merges that make its parts"),
        (put([], "model", "merges"), "only 0 merges"),
        (put(5, "model", "vocab", "a"), "share an id"),
        (put(-5, "model", "vocab", "a"), r"has the id -5; ids are from 0 to 2\*\*31 - 1"),
        (put(True, "model", "vocab", "a"), "strings to whole numbers"),
        (put(500, "model", "vocab", "日"), "'日'.* is not in GPT-2's byte alphabet"),
        (put(50, "added_tokens", 0, "id"), "share an id"),
        (put(5000, "added_tokens", 0, "id"), "share an id"),
        (put(True, "added_tokens", 0, "lstrip"), "option lstrip of the added token '<|begin|>'"),
        (put(True, "added_tokens", 1, "rstrip"), "option rstrip"),
        (put(True, "added_tokens", 1, "single_word"), "option single_word"),
        (put([], "model"), "not a tokenizer file as Hugging Face writes it"),
    ],
)
def test_tokenizer_files_that_cannot_be_read(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    raw = copy.deepcopy(SMALL)
    change(raw)
    with pytest.raises(ValueError, match=words):
        tokenizer_from_folder(folder_with(tmp_path, raw))


@pytest.mark.parametrize("text", ["{", "", "[1]", '"x"', "[" * 100_000, '{"a": 1, "a": 2}'])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"not valid JSON|expected a JSON object"):
        tokenizer_from_folder(tmp_path)


def test_json_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json' cannot be read as text"):
        tokenizer_from_folder(tmp_path)


def test_a_missing_json_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json' does not exist"):
        read_json(tmp_path / "config.json")
    assert read_json(tmp_path / "config.json", missing_ok=True) == {}


NUMBERS = st.integers(-2, 300) | st.sampled_from(
    [1 << 31, 1 << 32, 1 << 64, 10**400, float("nan"), 1e308]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text(max_size=4)
    | st.sampled_from(["a", "Ġ", "th", "<|end|>", "BPE", "\\p{L}+", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)


def replace_something(data: st.DataObject, raw: Any) -> None:
    """Walk down from `raw` by drawn keys and put, or remove, a value there."""
    while True:
        key = data.draw(st.sampled_from(sorted(raw) if isinstance(raw, dict) else range(len(raw))))
        if (
            not isinstance(raw[key], dict | list)
            or not raw[key]
            or data.draw(st.integers(0, 3)) == 0
        ):
            break
        raw = raw[key]
    if data.draw(st.integers(0, 4)) == 0:
        del raw[key]
    else:
        raw[key] = data.draw(JSON)


WHOLE = SMALL | {
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]},
    "normalizer": {"type": "NFC"},
    "post_processor": json.loads(train("llama3", n_vocab=280).to_str())["post_processor"],
}
FILES = {
    "tokenizer": WHOLE,
    "tokenizer_config": {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>"},
    },
    "generation_config": {"eos_token_id": [1, 2]},
    "config": {"eos_token_id": 1},
}


@pytest.fixture
def each_template_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each template runs in its own process; most examples share one, so it is rendered once."""
    rendered, whole = {}, Renderer.render

    def render_once(self: Renderer, messages: Any) -> str:
        request = self._template, messages, self._tokens
        key = json.dumps(request)
        if key not in rendered:
            rendered[key] = whole(self, messages)
        return rendered[key]

    monkeypatch.setattr(Renderer, "render", render_once)


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_forged_tokenizer_files_give_a_tokenizer_or_one_kind_of_error(
    tmp_path: Path, each_template_once: None, data: st.DataObject
) -> None:
    files = copy.deepcopy(FILES)
    for _ in range(data.draw(st.integers(1, 2))):
        which = data.draw(
            st.sampled_from(
                ["tokenizer"] * 5
                + ["tokenizer_config", "tokenizer_config", "generation_config", "config"]
            )
        )
        if files[which]:
            replace_something(data, files[which])
    try:
        ours = tokenizer_from_folder(folder_with(tmp_path, files.pop("tokenizer"), **files))
        assert all(0 <= i < ours.n_vocab for i in ours.encode("Ab 12 é <|end|>"))
        if ours.chat_template is not None:
            ours.decode(ours.chat(CHAT))
    except (ValueError, FileNotFoundError) as error:
        assert str(error)


# GGUF metadata: the same tokenizer in the other spelling


def gguf_fields() -> dict[str, Any]:
    vocab = sorted(SMALL["model"]["vocab"].items(), key=lambda item: item[1])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [text for text, _ in vocab],
        "tokenizer.ggml.token_type": [3 if text in SPECIAL else 1 for text, _ in vocab],
        "tokenizer.ggml.merges": [" ".join(m) for m in SMALL["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }


@pytest.mark.parametrize(
    ("pre", "style"),
    [("gpt-2", "gpt2"), ("smollm", "smollm"), ("llama-bpe", "llama3"), ("qwen2", "qwen2")],
)
def test_gguf_and_hf_spell_the_same_tokenizer(tmp_path: Path, pre: str, style: str) -> None:
    hf = train(style, n_vocab=280)
    hf.save(str(tmp_path / "tokenizer.json"))
    raw = json.loads(hf.to_str())
    vocab = sorted(raw["model"]["vocab"].items(), key=lambda item: item[1])
    fields = gguf_fields() | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [text for text, _ in vocab],
        "tokenizer.ggml.merges": [" ".join(m) for m in raw["model"]["merges"]],
    }
    a, b = tokenizer_from_gguf(fields), tokenizer_from_folder(tmp_path)
    for text in TEXTS:
        assert a.encode(text) == b.encode(text)
    assert a.stop_ids == (1,)
    assert a.decode(a.chat(CHAT)) == "<|begin|>Hi!<|end|>"


def test_unused_gguf_tokens_are_never_produced() -> None:
    fields = gguf_fields()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 5, 5]
    ours = tokenizer_from_gguf(fields)
    assert ours.n_vocab == 280
    assert ours.encode("[PAD1]") == tokenizer_from_gguf(gguf_fields()).encode("[PAD1]")


@pytest.mark.parametrize(
    ("text", "kind", "stops"),
    [
        ("<|im_end|>", 3, True),
        ("<|eot_id|>", 4, True),
        ("<end_of_turn>", 1, True),  # a converter forgot to mark it
        ("<|endoftext|>", 5, False),
        ("</s>", 3, True),
        ("</s>", 1, False),  # a tag of HTML
        ("<|im_start|>", 3, False),
    ],
)
def test_gguf_answers_end_with_a_token_known_by_its_text(text: str, kind: int, stops: bool) -> None:
    fields = gguf_fields()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], text]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], kind]
    del fields["tokenizer.ggml.eos_token_id"]
    ours = tokenizer_from_gguf(fields)
    # "<|end|>" of the vocabulary is such a text as well.
    assert ours.stop_ids == ((1, 280) if stops else (1,))
    assert (ours.encode(text) == [280]) is (stops or kind == 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "GGUF tokenizer 'llama' .* is not implemented"),
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not implemented"),
        ({"pre": ["gpt-2"]}, "wrong kind"),
        ({"tokens": None}, "missing or of different lengths"),
        ({"token_type": [1]}, "missing or of different lengths"),
        ({"tokens": ["a"] * 280}, "same token twice"),
        ({"tokens": list(range(280))}, "wrong kind"),
        ({"merges": [1, 2]}, "wrong kind"),
        ({"merges": []}, "only 0 merges"),
        ({"bos_token_id": "a"}, "wrong kind"),
        ({"eos_token_id": 280}, "id 280 is outside the vocabulary"),
    ],
)
def test_gguf_metadata_that_cannot_be_read(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tokenizer_from_gguf(
            gguf_fields() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        )


def test_a_gguf_template_that_is_no_text() -> None:
    with pytest.raises(ValueError, match="chat template is a list"):
        tokenizer_from_gguf(gguf_fields() | {"tokenizer.chat_template": [1]})
