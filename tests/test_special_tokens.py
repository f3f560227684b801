"""Control tokens, wherever a folder names them: as transformers reads them, or refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import CHAT, SMALL, folder_with, train
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from minillm import Tokenizer
from minillm.tools.chat_template import _environment, render
from minillm.weights.tokenizer_files import tokenizer_from_folder

# The vocabulary of SMALL ends with id 279.
TURNS = "{% for m in messages %}<|turn|>{{ m.content }}<|done|>{% endfor %}<|turn|>"
TEXT = "<|turn|>one<|done|><|end|>two<|pad|><|rest|><s>in the inn"


def token(text: str, **options: bool) -> dict[str, Any]:
    """A token as transformers writes it."""
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"__type": "AddedToken", "content": text, "special": True} | flags | options


def both(folder: Path, settings: dict[str, Any], **files: Any) -> tuple[Tokenizer, Any]:
    """(ours, transformers') of one folder."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TURNS} | settings
    folder_with(folder, SMALL, tokenizer_config=settings, **files)
    return tokenizer_from_folder(folder), AutoTokenizer.from_pretrained(folder)


LISTED = {"280": token("<|turn|>"), "281": token("<|done|>")}
THE = SMALL["model"]["vocab"]["in"]


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"added_tokens_decoder": LISTED, "eos_token": "<|done|>"}, {}),
        ({"eos_token": "<|done|>"}, {"added_tokens": {"<|done|>": 281, "<|turn|>": 280}}),
        ({"additional_special_tokens": ["<|turn|>", "<|done|>"], "eos_token": "<|done|>"}, {}),
        ({"extra_special_tokens": [token("<|turn|>"), token("<|done|>")]}, {}),
        ({}, {"special_tokens_map": {"additional_special_tokens": ["<|turn|>", "<|done|>"]}}),
        (
            {"additional_special_tokens": ["<|turn|>"]},
            {"special_tokens_map": {"extra_special_tokens": ["<|done|>"], "eos_token": "<|end|>"}},
        ),
        ({"eos_token": "<|end|>"}, {"special_tokens_map": {"eos_token": token("<|begin|>")}}),
        # transformers doesn't look at the map if tokenizer_config.json lists the tokens.
        (
            {"added_tokens_decoder": LISTED, "eos_token": "<|end|>"},
            {"special_tokens_map": {"eos_token": "<|done|>", "bos_token": "<s>"}},
        ),
        ({"pad_token": "<|pad|>", "bos_token": "<s>", "eos_token": "<|end|>"}, {}),
        ({"pad_token": "<|pad|>", "rest_token": "<|rest|>", "cls_token": "<s>"}, {}),
        ({"extra_special_tokens": {"rest": "<|rest|>", "turn_token": "<|turn|>"}}, {}),
        # An ordinary token of the vocabulary with a role
        ({"eos_token": "in"}, {}),
        ({"eos_token": "in"}, {"added_tokens": {"in": THE, "<|done|>": 280}}),
        ({"add_bos_token": True, "bos_token": "<|begin|>"}, {}),
        ({"add_bos_token": False, "bos_token": "<|begin|>"}, {}),
        ({"add_eos_token": True, "eos_token": "<|end|>"}, {}),
        ({"add_eos_token": False, "eos_token": None, "bos_token": ""}, {}),
    ],
)
def test_tokens_of_every_file(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, Any]
) -> None:
    ours, theirs = both(tmp_path, settings, **files)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    assert ours.chat(CHAT) == theirs.apply_chat_template(CHAT)["input_ids"]
    eos = theirs.eos_token_id
    assert ours.stop_ids == (() if eos is None else (eos,))
    for text, i in theirs.get_added_vocab().items():
        assert ours.special[text] == i and ours.decode([i]) == text


@pytest.mark.parametrize(
    ("settings", "files", "words"),
    [
        (
            {"eos_token": "<|dnoe|>"},
            {},
            r"eos_token '<\|dnoe\|>' is no token of its vocabulary.* correct it in",
        ),
        ({}, {"special_tokens_map": {"eos_token": "<|dnoe|>"}}, "is no token of its vocabulary"),
        ({"eos_token": 5}, {}, "eos_token is 5; it must be a string"),
        ({"pad_token": {"text": "x"}}, {}, "pad_token is .*; it must be a string"),
        (
            {},
            {"added_tokens": {"<|turn|>": 300}},
            r"added_tokens.json gives the token '<\|turn\|>' the id 300, .* it is 280",
        ),
        ({}, {"added_tokens": {"in": 300}}, f"'in' the id 300, .* it is {THE}"),
        ({}, {"added_tokens": {"<|turn|>": "280"}}, "has '280' for an id"),
        ({"added_tokens_decoder": {"281": token("<|turn|>")}}, {}, "the id 281, .* it is 280"),
        ({"added_tokens_decoder": {"x": token("<|turn|>")}}, {}, "has 'x' for an id"),
        ({"added_tokens_decoder": {"280": token("<|turn|>", lstrip=True)}}, {}, "option lstrip"),
        ({"added_tokens_decoder": {"1": token("<|end|>", rstrip=True)}}, {}, "option rstrip"),
        ({"pad_token": token("<|pad|>", single_word=True)}, {}, "option single_word"),
        ({"extra_special_tokens": "<|pad|>"}, {}, "extra_special_tokens is '<|pad|>'"),
        ({"extra_special_tokens": [3]}, {}, "A special token is 3; it must be a string"),
        ({"added_tokens_decoder": [1]}, {}, "is not a tokenizer file as Hugging Face writes it"),
    ],
)
def test_tokens_that_files_disagree_about(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, Any], words: str
) -> None:
    folder_with(tmp_path, SMALL, tokenizer_config=settings, **files)
    with pytest.raises(ValueError, match=words):
        tokenizer_from_folder(tmp_path)


# What templates may name and call

NAMES = {"bos_token": "<|begin|>", "pad_token": "<|pad|>", "rest_token": token("<|rest|>")}
TEMPLATES = [
    "{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ rest_token }}{{ turn }}",
    "{% if unk_token is defined %}set{% else %}not set{% endif %}{{ unk_token is none }}",
    "{% if eos_token %}{{ eos_token }}{% endif %}|{{ eos_token | default('none') }}",
    "{{ eos_token + 'x' }}",
    "{{ strftime_now('%Y-%m-%d') }}{{ strftime_now(format='%B') }}",
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}1999{% endif %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "a {%- generation -%}  {{ messages[0].content }}  {%- endgeneration -%} b",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% generation %}x",
    "{{ {'b': '<é>', 'a': 1} | tojson }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "{{ [1, 'é'] | tojson(indent=1) }}{{ 'é' | tojson(ensure_ascii=true) }}",
    "{{ {'a': [1]} | tojson(separators=(',', ':')) }}",
    "{{ {'a': 1} | tojson(default=1) }}",
    "{{ dict(a=1) | tojson }}{{ dict.fromkeys([1, 2], 0) }}",
    "{% set n = namespace(a=1) %}{% set n.b = 2 %}{{ n.a + n.b }}",
    "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ nothing }}",
    "{{ continue_final_message is defined }}{{ enable_thinking is defined }}",
    "{{ lipsum is defined }}{{ range(3) | list }}{{ cycler is defined }}{{ joiner is defined }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_see_what_transformers_shows_them(tmp_path: Path, template: str) -> None:
    settings = NAMES | {"chat_template": template, "extra_special_tokens": {"turn": "<|turn|>"}}
    ours, theirs = both(tmp_path, settings)
    try:
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # Jinja's kinds, and TypeError
        with pytest.raises(ValueError, match=f"template failed: .*{type(error).__name__}"):
            ours.chat(CHAT)
    else:
        assert ours.decode(ours.chat(CHAT)) == expected


def test_templates_have_the_functions_of_transformers() -> None:
    """Every global, filter and test, by name: none is missing, none is more."""
    environment = _environment()
    theirs = chat_template_utils._compile_jinja_template("").environment
    for kind in ("globals", "filters", "tests"):
        assert getattr(environment, kind).keys() == getattr(theirs, kind).keys()
    assert {"generation", "break", "continue"} <= {
        tag for e in environment.extensions.values() for tag in e.tags
    }


def test_a_date_is_that_of_this_machine() -> None:
    (expected,), _ = render_jinja_template([CHAT], chat_template="{{ strftime_now('%d %b %Y') }}")
    assert re.fullmatch(r"\d\d \w+ \d{4}", expected)
    assert render("{{ strftime_now('%d %b %Y') }}", CHAT, {}) == expected


def test_templates_by_name_without_a_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder_with(tmp_path, SMALL, tokenizer_config={"chat_template": named})
    ours = tokenizer_from_folder(tmp_path)
    assert ours.encode("x") and ours.chat_template is None
    with pytest.raises(ValueError, match=r"named \['rag', 'tool_use'\], and none is the default"):
        ours.chat(CHAT)
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert tokenizer_from_folder(tmp_path).chat_template == "from a file"


def test_a_split_by_a_plain_string_is_refused_by_name(tmp_path: Path) -> None:
    raw = json.loads(train("qwen2", n_vocab=280).to_str())
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"String": "-"}
    with pytest.raises(ValueError, match=r"pre-tokenizer .*'String': '-'.* is not implemented"):
        tokenizer_from_folder(folder_with(tmp_path, raw))
