"""Keys of a GGUF file's metadata: read, known to change nothing, or refused by name."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from test_hostile import FLOAT, TEXT, field, write_gguf

from minillm import load

UINT, BOOL, LIST = (
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.BOOL,
    gguf.GGUFValueType.ARRAY,
)


def logits(path: Path) -> torch.Tensor:
    model, _ = load(path, device="cpu", dtype="float32")
    with torch.inference_mode():
        return model(torch.tensor([[1, 5, 9, 77, 30]]))


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("attention.causal", True, BOOL),
        ("rope.scaling.attn_factor", 1.0, FLOAT),
        ("rope.scaling.yarn_ext_factor", 0.0, FLOAT),
        ("rope.scaling.finetuned", True, BOOL),
        ("rope.scaling.original_context_length", 4096, UINT),
        ("attention.clamp_kqv", 0.0, FLOAT),
        ("attention.layer_norm_epsilon", 1e-5, FLOAT),
        ("attention.sliding_window", 0, UINT),
        ("attention.key_length", 16, UINT),
        ("attention.value_length", 16, UINT),
        ("rope.dimension_sections", [0, 0, 0, 0], LIST),
        ("rope.something_new", 0, UINT),
        ("pooling_type", 3, UINT),
        ("tensor_data_layout", "Meta AI original pth", TEXT),
        ("attention.head_count_kv", [2], LIST),
    ],
)
def test_keys_that_change_nothing(tmp_path: Path, key: str, value: Any, kind: Any) -> None:
    plain = logits(write_gguf(tmp_path / "plain.gguf"))
    path = write_gguf(tmp_path / "m.gguf", replace=[(f"llama.{key}", value, kind)])
    assert torch.equal(logits(path), plain)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("attention.causal", False, BOOL),
        ("rope.scaling.attn_factor", 2.0, FLOAT),
        ("rope.scaling.yarn_attn_factor", 0.5, FLOAT),
        ("rope.scaling.yarn_ext_factor", 1.0, FLOAT),
        ("rope.scaling.yarn_log_multiplier", 0.1, FLOAT),
        ("rope.scaling.alpha", 1000.0, FLOAT),
        ("rope.freq_base_swa", 1e4, FLOAT),
        ("rope.dimension_sections", [2, 3, 3, 0], LIST),
        ("rope.something_new", "on", TEXT),
        ("attention.scale", 0.1, FLOAT),
        ("attention.clamp_kqv", 8.0, FLOAT),
        ("attention.max_alibi_bias", 8.0, FLOAT),
        ("attention.temperature_scale", 0.1, FLOAT),
        ("attention.sliding_window_pattern", [True, False], LIST),
        ("logit_scale", 0.5, FLOAT),
        ("final_logit_softcapping", 30.0, FLOAT),
    ],
)
def test_keys_that_would_change_the_numbers(
    tmp_path: Path, key: str, value: Any, kind: Any
) -> None:
    path = write_gguf(tmp_path / "m.gguf", **field(key, value, kind))
    with pytest.raises(ValueError, match=rf"m\.gguf sets 'llama\.{key}' = .*not implemented"):
        load(path, device="cpu")


@pytest.mark.parametrize("name", ["eos_token", "sep_token", "space_prefix"])
def test_what_is_added_to_every_text(tmp_path: Path, name: str) -> None:
    key = f"tokenizer.ggml.add_{name}"
    plain = load(write_gguf(tmp_path / "m.gguf"))[1].encode("Hi")
    path = write_gguf(tmp_path / "m.gguf", field=(key, False, BOOL))
    assert load(path, device="cpu")[1].encode("Hi") == plain
    path = write_gguf(tmp_path / "m.gguf", field=(key, True, BOOL))
    with pytest.raises(ValueError, match=rf"sets '{key}' = True, which is not implemented"):
        load(path, device="cpu")


def test_keys_of_other_architectures_count_for_nothing(tmp_path: Path) -> None:
    plain = logits(write_gguf(tmp_path / "plain.gguf"))
    path = write_gguf(tmp_path / "m.gguf", field=("gemma.attention.scale", 0.5, FLOAT))
    assert torch.equal(logits(path), plain)


@pytest.mark.parametrize(
    "key",
    [
        "block_count", "embedding_length", "attention.head_count", "feed_forward_length",
        "context_length",
    ],
)  # fmt: skip
def test_missing_sizes_are_named_with_the_file(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", replace=[(f"llama.{key}", None, None)])
    with pytest.raises(ValueError, match=rf"m\.gguf lacks llama\.{key}; convert the model again"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("block_count", 1.5, FLOAT, r"llama\.block_count = 1\.5; it must be a whole number"),
        ("attention.head_count_kv", [2, 1], LIST, r"head_count_kv = \[2, 1\]; layers of different"),
        ("feed_forward_length", [32, 64], LIST, "feed_forward_length = .*; layers of different"),
        ("attention.key_length", 7, UINT, r"m\.gguf: d_head is 7"),
        ("attention.value_length", 8, UINT, r"8 of 16 dimensions .*llama\.attention\.value_length"),
        ("embedding_length", 0, UINT, r"m\.gguf: d_"),
    ],
)
def test_sizes_that_are_wrong(tmp_path: Path, key: str, value: Any, kind: Any, words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", replace=[(f"llama.{key}", value, kind)])
    with pytest.raises(ValueError, match=words) as caught:
        load(path)
    assert "config.json" not in str(caught.value)
