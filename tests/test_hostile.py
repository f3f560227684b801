"""Hostile files and calls: each quickly gives one sentence, or the right model."""

import itertools
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_tokenizer import SMALL, folder_with

from minillm import Decoder, load, merge_kv_heads, prepack
from minillm.hf_config import from_hf
from minillm.tools import chat_template as template_module
from minillm.weights import safetensors_folder
from minillm.weights.build import parameter_sources
from minillm.weights.gguf_header import read_gguf
from minillm.weights.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 40, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip


def tensors(seed: int = 0, **changes: object) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sources = parameter_sources(from_hf(CONFIG | changes))
    shapes = {name: shape for part in sources.values() for name, shape in part.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def folder(path: Path, values: dict[str, torch.Tensor] | None = None, **changes: object) -> Path:
    """config.json and model.safetensors."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors(**changes) if values is None else values, path / "model.safetensors")
    return path


def shard(path: Path, values: dict[str, torch.Tensor]) -> None:
    """The same values in two shards and an index."""
    names = sorted(values)
    weight_map = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({n: values[n] for n in names if weight_map[n] == part}, path / part)
    index = {"weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def embedding(path: Path) -> torch.Tensor:
    return load(path, device="cpu")[0].embed.weight


# Which file counts


@pytest.mark.parametrize("old_shards", [True, False])
def test_a_stale_index_does_not_beat_the_single_file(tmp_path, old_shards):
    new, old = tensors(1), tensors(2)
    path = folder(tmp_path / "m", new)
    shard(path, old)
    if not old_shards:
        for part in path.glob("part-*"):
            part.unlink()
    name = "model.embed_tokens.weight"
    assert torch.equal(embedding(path), new[name])
    if old_shards:
        (path / "model.safetensors").unlink()
        assert torch.equal(embedding(path), old[name])


def test_a_tensor_in_two_shards(tmp_path):
    path = folder(tmp_path / "m")
    values = tensors()
    shard(path, values)
    (path / "model.safetensors").unlink()
    save_file(values, path / "part-1.safetensors")
    with pytest.raises(ValueError, match=r"part-1\.safetensors and part-0\.safetensors both hold"):
        load(path)


def test_headers_are_not_read_for_each_tensor(tmp_path, monkeypatch):
    path = folder(tmp_path / "m", num_hidden_layers=500)
    opened = []
    real = safetensors_folder.SafetensorsFolder.__init__

    def counted(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        inner = self._open
        self._open = lambda *a, **k: opened.append(a) or inner(*a, **k)

    monkeypatch.setattr(safetensors_folder.SafetensorsFolder, "__init__", counted)
    load(path, device="cpu")
    assert len(opened) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none(tmp_path, bad):
    values = tensors()
    values["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are"):
        load(folder(tmp_path / "m", values))


def test_numbers_too_large_for_the_dtype(tmp_path):
    values = tensors()
    values["model.norm.weight"][3] = 1e6
    path = folder(tmp_path / "m", values)
    load(path, device="cpu")
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight holds .* not finite in torch\.float"
    ):
        load(path, device="cpu", dtype="float16")


def test_rows_that_no_group_divides(tmp_path):
    """16 and 24 numbers: the smallest group has 32."""
    path = folder(tmp_path / "m")
    with pytest.raises(ValueError, match=r"has 16 columns, .* do not divide; take int8\."):
        load(path, device="cpu", dtype="int4")


# What is not a file, and sizes


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
def test_files_must_be_regular(tmp_path, name, kind):
    path = folder(tmp_path / "m")
    (path / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path / name)
    elif kind == "zero":
        (path / name).symlink_to("/dev/zero")
    else:
        (path / name).mkdir()
    with pytest.raises(ValueError, match="is not a regular file"):
        load(path)


def test_sizes_are_bounded(tmp_path):
    path = folder(tmp_path / "m")
    (path / "tokenizer.json").write_text("[" + "[],[]," * 1_000_001 + "1]")
    with pytest.raises(ValueError, match="more than 2000000 lists and objects"):
        load(path)
    (path / "config.json").write_text(" " * 1_100_000 + json.dumps(CONFIG))
    with pytest.raises(
        ValueError, match=r"has 1100.* bytes; files of this kind have at most 1000000"
    ):
        load(path)


def test_a_key_twice(tmp_path):
    path = folder(tmp_path / "m")
    (path / "config.json").write_text('{"model_type": "llama", "a": 1, "a": 2}')
    with pytest.raises(ValueError, match="the key 'a' appears twice"):
        load(path)


@pytest.mark.parametrize("value", ["x" * 1_000_000, "\x1b[2J\n" * 5, ["y" * 999_000]], ids=len)
@pytest.mark.parametrize("key", ["model_type", "hidden_act", "hidden_size", "rope_scaling"])
def test_messages_are_bounded_and_escaped(tmp_path, key, value):
    path = folder(tmp_path / "m")
    (path / "config.json").write_text(json.dumps(CONFIG | {key: value})[:1_000_000])
    with pytest.raises(ValueError) as caught:
        load(path)
    message = str(caught.value)
    assert len(message) < 1000 and message.isprintable()


def test_a_template_that_is_no_text_is_named(tmp_path):
    folder_with(tmp_path, SMALL)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja' cannot be read as text"):
        tokenizer_from_folder(tmp_path)


# GGUF


def write_gguf(path: Path, *, epsilon: bool = True, **extra: Any) -> Path:
    """A tiny Llama in F32, through the gguf package's writer.

    extra: "field…" adds a field (key, value, type), `replace` is a list of fields to set in place
    of others (None removes one), `rename` gives tensors other names.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1), writer.add_embedding_length(32), writer.add_head_count(2)
    writer.add_head_count_kv(2), writer.add_feed_forward_length(32), writer.add_context_length(64)
    if epsilon:
        writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(270)
    add_tokenizer(writer)
    for key, value in extra.items():
        writer.add_key_value(*value) if key.startswith("field") else None
    for key, value, kind in extra.get("replace", []):
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_array(key, value) if isinstance(value, list) else writer.add_key_value(
                key, value, kind
            )
    names = {
        "token_embd": (270, 32), "output_norm": (32,), "output": (270, 32),
        "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (32, 32), "blk.0.attn_v": (32, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
    }  # fmt: skip
    random = np.random.default_rng(0)
    for name, shape in names.items():
        stem = extra.get("rename", {}).get(name, name)
        writer.add_tensor(f"{stem}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocab = sorted(SMALL["model"]["vocab"], key=SMALL["model"]["vocab"].get)[:256]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([1] * len(vocab))


def field(key: str, value: Any, kind: gguf.GGUFValueType) -> dict[str, Any]:
    inner = (gguf.GGUFValueType.get_type(value[0]),) if isinstance(value, list) else ()
    return {f"field {key}": (f"llama.{key}", value, kind, *inner)}


FLOAT, TEXT = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
@pytest.mark.parametrize("kind", [None, "linear", "none"])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_linear_rope_scaling(tmp_path, key, kind, factor):
    """As llama.cpp reads it: an absent type is linear."""
    extra = field(key, factor, FLOAT)
    if kind:
        extra |= field("rope.scaling.type", kind, TEXT)
    path = write_gguf(tmp_path / "m.gguf", **extra)
    if factor == 1 or kind == "none":
        load(path, device="cpu")
    else:
        with pytest.raises(ValueError, match=rf"llama\.{key} = 4\.0: linear rope scaling is not"):
            load(path)


def test_other_names_do_not_pass(tmp_path):
    for rename in (
        {"output_norm": "model.norm"},
        {"blk.0.attn_q": "model.layers.0.self_attn.q_proj"},
    ):
        path = write_gguf(tmp_path / "m.gguf", rename=rename)
        with pytest.raises(ValueError, match="does not fit its config: it lacks 1 tensors"):
            load(path)


def test_a_missing_epsilon(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", epsilon=False)
    with pytest.raises(ValueError, match=r"lacks llama\.attention\.layer_norm_rms_epsilon"):
        load(path)


def offsets(path: Path) -> list[int]:
    """Where in the file the tensors' offsets are, in order."""
    data = path.read_bytes()
    places = []
    for name, tensor in read_gguf(path)[1].items():
        at = data.index(struct.pack("<Q", len(name)) + name.encode())
        places.append(at + 8 + len(name) + 4 + 8 * len(tensor.shape) + 4)
    return places


def test_every_offset_is_checked(tmp_path):
    """Swapped, equal and shifted ones; 400 files."""
    path = write_gguf(tmp_path / "m.gguf")
    valid, places = path.read_bytes(), offsets(path)
    assert load(path, device="cpu")
    values = [struct.unpack_from("<Q", valid, p)[0] for p in places]
    assert values == sorted(values) and values[0] == 0
    forged = []
    for i, j in itertools.combinations(range(len(places)), 2):
        swapped, equal = list(values), list(values)
        swapped[i], swapped[j] = values[j], values[i]
        equal[j] = values[i]
        forged += [swapped, equal]
    for i, shift in itertools.product(range(len(places)), (-32, -1, 1, 7, 32, 64)):
        shifted = list(values)
        shifted[i] = max(0, values[i] + shift) if values[i] + shift != values[i] else 1
        forged.append(shifted if shifted != values else [1, *values[1:]])
    for wrong in forged:
        data = bytearray(valid)
        for place, value in zip(places, wrong, strict=True):
            struct.pack_into("<Q", data, place, value)
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is not a usable GGUF file"):
            load(path)
    assert len(forged) > 200


@pytest.mark.parametrize("alignment", [1, 4, 12, 1 << 21])
def test_alignments(tmp_path, alignment):
    key = ("general.alignment", alignment, gguf.GGUFValueType.UINT32)
    path = write_gguf(tmp_path / "m.gguf", **{"field": key})
    with pytest.raises(ValueError, match=r"its alignment .* is not a multiple of 8"):
        load(path)


# Tokenizers


@pytest.mark.parametrize(
    "pattern",
    [
        r"\K|[\s\S]",
        "(" * 5000 + "a" + ")" * 5000 + r"|[\s\S]",
        r"(?:[\s\S]|[\s\S][\s\S])*\d\d\d\d$|[\s\S]",
        r"(?R)|[\s\S]",
        r"(?:a|aa)+$|[\s\S]",
    ],
    ids=["keep", "nested", "backtracking", "recursive", "exponential"],
)
def test_evil_patterns(tmp_path, pattern):
    """The result is a tokenizer or one sentence; no panic, no hang."""
    raw = json.loads(json.dumps(SMALL))
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    try:
        tokenizer = tokenizer_from_folder(folder_with(tmp_path, raw))
    except ValueError as error:
        assert len(str(error)) < 1000
        return
    try:
        tokenizer.encode("some text 1234" * 3)
    except ValueError as error:
        assert "tiktoken cannot split" in str(error)


def test_ids_out_of_range(tmp_path):
    raw = json.loads(json.dumps(SMALL))
    raw["added_tokens"][0]["id"] = -1000
    with pytest.raises(ValueError):
        tokenizer_from_folder(folder_with(tmp_path, raw))
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1],
        "tokenizer.ggml.bos_token_id": -1000, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="bos_token_id -1000 is outside"):
        tokenizer_from_gguf(fields)


def test_millions_of_control_tokens():
    tokens = [f"<{i}>" for i in range(1_900_000)]
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * len(tokens),
    }  # fmt: skip
    with pytest.raises(ValueError, match="has 1900000 control tokens; at most 20000"):
        tokenizer_from_gguf(fields)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ lipsum(n=10**7) }}",
        "{{ ('a' * 10**9) | wordwrap(1) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}{{ ns.s }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '%0999999999d' % 1 }}",
    ],
    ids=["loops", "lipsum", "wordwrap", "doubling", "recursion", "width"],
)
def test_templates_have_limits(tmp_path, template, monkeypatch):
    monkeypatch.setattr(template_module, "SECONDS", 3)
    settings = {"chat_template": template}
    tokenizer = tokenizer_from_folder(folder_with(tmp_path, SMALL, tokenizer_config=settings))
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.chat([{"role": "user", "content": "Hi"}])


# Calls


def test_other_calls(tmp_path):
    model = Decoder(from_hf(CONFIG))
    with pytest.raises(ValueError, match="device 'meta' is not known or not usable"):
        load(folder(tmp_path / "m"), device="meta")
    with pytest.raises(ValueError, match="merge the heads before `prepack`"):
        merge_kv_heads(prepack(model), 1)
    shutil.rmtree(tmp_path / "m")
