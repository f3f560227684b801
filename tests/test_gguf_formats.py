"""Number formats of GGUF files against the gguf package, and files that cannot be read."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from test_weights import (
    UINT,
    assert_same_logits,
    gguf_name,
    put,
    random_model,
    small,
    write_gguf,
)
from transformers import PreTrainedModel, Qwen2Config

from minillm import load
from minillm.quantization.linear import QuantizedLinear

FORMATS = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0",
    "TQ2_0", "MXFP4", "NVFP4",
]  # fmt: skip


@cache
def sensible_blocks(kind: GGMLQuantizationType) -> np.ndarray:
    """Random bytes, of which the blocks with sensible numbers are kept.

    So every bit pattern of a block occurs, also those that no quantizer would write.
    """
    size, n_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (500_000 // size, n_bytes), np.uint8)
    with np.errstate(all="ignore"):
        largest = np.abs(gguf.quants.dequantize(blocks, kind)).max(-1)
        return blocks[np.argsort(abs(np.log(largest / 0.1)))[:50]]  # NaN comes last


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """A matrix as a file stores it."""
    n_blocks = math.prod(shape) // GGML_QUANT_SIZES[kind][0]
    chosen = np.random.default_rng(seed).choice(sensible_blocks(kind), n_blocks)
    return chosen.reshape(shape[0], -1)


def stored_as(kind: str, model: PreTrainedModel) -> Callable[[gguf.GGUFWriter], None]:
    """A change of a file being written: random blocks for the matrices, and for the model's own."""
    quantization = GGMLQuantizationType[kind]

    def change(w: gguf.GGUFWriter) -> None:
        for i, (name, p) in enumerate(model.state_dict().items()):
            if gguf_name(name) not in w.tensors[0] or p.dim() == 1:
                continue
            stored = random_blocks(quantization, tuple(p.shape), seed=i)
            p.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantization)))
            del w.tensors[0][gguf_name(name)]
            w.add_tensor(gguf_name(name), stored, raw_dtype=quantization)

    return change


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_that_the_gguf_package_converts(tmp_path: Path, kind: str) -> None:
    """The numbers are the package's own, bit by bit, and the logits those of transformers."""
    if GGMLQuantizationType.__members__.get(kind) not in GGML_QUANT_SIZES:
        pytest.skip(f"this gguf package has no {kind}")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    theirs = random_model(small(Qwen2Config, vocab_size=258, **sizes))
    path = write_gguf(tmp_path / "m.gguf", theirs, "F32", stored_as(kind, theirs))
    ours, _ = load(path, device="cpu", dtype="float32")
    expected = theirs.state_dict()
    layer = "model.layers.0."
    for mine, name in (
        (ours.embed.weight, "model.embed_tokens.weight"),
        (ours.layers[0].down.weight, f"{layer}mlp.down_proj.weight"),
        (ours.layers[0].qkv.weight[:256], f"{layer}self_attn.q_proj.weight"),
    ):
        assert torch.equal(mine, expected[name])
    assert_same_logits(ours, theirs)


def test_the_list_of_formats_is_complete() -> None:
    """Whatever this gguf package converts is in the list above, or no quantization."""
    from minillm.weights.gguf_header import _can_be_read

    readable = {kind.name for kind in GGMLQuantizationType if _can_be_read(kind.name)}
    assert readable <= {*FORMATS, "F32", "F16", "BF16"}


@pytest.mark.slow
def test_rows_of_q_and_k_in_a_llama_file(tmp_path: Path) -> None:
    """llama.cpp's order of rows is undone for blocks of 256 numbers as well."""
    theirs = random_model(small(hidden_size=256, intermediate_size=256, num_hidden_layers=1))
    path = write_gguf(tmp_path / "m.gguf", theirs, "F32", stored_as("Q6_K", theirs))
    ours, _ = load(path, device="cpu", dtype="float32")
    stored = theirs.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    expected = stored.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert torch.equal(ours.layers[0].qkv.weight[:256], expected)


@pytest.mark.slow
def test_other_formats_are_quantized_again(tmp_path: Path) -> None:
    """What is not stored in Q4_0 or Q4_1 is converted to numbers first."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    theirs = random_model(small(Qwen2Config, **sizes))
    path = write_gguf(tmp_path / "m.gguf", theirs, "F32", stored_as("Q5_K", theirs))
    exact, _ = load(path, device="cpu", dtype="float32")
    ours, _ = load(path, device="cpu", dtype="int4")
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear):
            wanted = exact.get_submodule(name).weight
            error = (module.dequantized() - wanted).abs().max() / wanted.abs().max()
            assert 0 < error < 0.1, name


KNOWN = GGMLQuantizationType.__members__  # an older gguf package has no Q1_0


@pytest.mark.parametrize(
    "kind", [kind for kind in ("Q1_0", "Q8_1", "Q8_K", "I8", "I32", "F64") if kind in KNOWN]
)
def test_formats_that_cannot_be_converted(tmp_path: Path, kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    block, n_bytes = GGML_QUANT_SIZES[quantization]

    def change(w: gguf.GGUFWriter) -> None:
        data = np.zeros((2, 256 // block * n_bytes), np.uint8)
        w.add_tensor("blk.9.attn_q.weight", data, raw_dtype=quantization)

    path = write_gguf(tmp_path / "m.gguf", random_model(small(num_hidden_layers=1)), "F32", change)
    with pytest.raises(
        ValueError,
        match=rf"is not damaged, but stores 'blk\.9\.attn_q\.weight' as {kind}, which the gguf "
        "package cannot convert; take a file in another format, such as Q4_K_M, Q8_0 or F16",
    ):
        load(path)


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    """64 columns cannot be stored in blocks of 256."""

    def change(w: gguf.GGUFWriter) -> None:
        w.add_tensor("extra.weight", np.zeros((2, 144), np.uint8), raw_dtype=q4_k)
        w.tensors[0]["extra.weight"].shape = (8, 64)

    q4_k = GGMLQuantizationType.Q4_K
    path = write_gguf(tmp_path / "m.gguf", random_model(small(num_hidden_layers=1)), "F32", change)
    with pytest.raises(ValueError, match="not made of whole Q4_K blocks"):
        load(path)


# One file of several, and files for other machines


def refused(path: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load(path, device="cpu")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def keep_only(wanted: Callable[[str], bool], no: int, count: int) -> Callable[[Any], None]:
    """A change of a file being written: the part of a split model that holds these tensors."""

    def change(w: gguf.GGUFWriter) -> None:
        for name in [name for name in w.tensors[0] if not wanted(name)]:
            del w.tensors[0][name]
        if no > 0:  # only the first part has the model's metadata
            w.kv_data[0].clear()
        for key, value in (("no", no), ("count", count), ("tensors.count", 12)):
            w.add_uint16(f"split.{key}", value)

    return change


@pytest.mark.parametrize("no", [0, 1, 2])
@pytest.mark.parametrize("name", ["m-00001-of-00003.gguf", "renamed.gguf"])
def test_any_part_of_a_split_model(tmp_path: Path, name: str, no: int) -> None:
    model = random_model(small(num_hidden_layers=1))
    change = keep_only(lambda n: len(n) % 3 == no, no, 3)
    path = write_gguf(tmp_path / name, model, "F32", change)
    refused(path, rf"is part {no + 1} of the 3 files of one model; merge all .*--merge")


def test_a_model_split_into_one_file(tmp_path: Path) -> None:
    model = random_model(small(num_hidden_layers=1))
    change = keep_only(lambda n: True, 0, 1)
    path = write_gguf(tmp_path / "m-00001-of-00001.gguf", model, "F32", change)
    assert_same_logits(load(path, device="cpu")[0], model)


@pytest.mark.parametrize(("part", "bytes_kept"), [(1, slice(0, 9000)), (2, slice(9000, None))])
def test_parts_cut_by_another_tool(tmp_path: Path, part: int, bytes_kept: slice) -> None:
    """They hold nothing that says so; the name does."""
    path = write_gguf(tmp_path / "m.gguf", random_model(small(num_hidden_layers=1)), "F32")
    cut = tmp_path / f"m-0000{part}-of-00002.gguf"
    cut.write_bytes(path.read_bytes()[bytes_kept])
    refused(cut, rf"by its name it is part {part} of 2: merge all of them")
    whole = tmp_path / "m-00001-of-00002.gguf"  # as it is called does not matter if it is whole
    whole.write_bytes(path.read_bytes())
    load(whole, device="cpu")


def test_big_endian_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    w = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    w.add_block_count(1)
    w.add_tensor("output_norm.weight", np.ones(4, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    refused(path, r"is a big-endian GGUF file.* convert it: gguf-convert-endian model\.gguf little")


def test_the_first_version_of_the_format(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        random_model(small(num_hidden_layers=1)),
        "F32",
        put("llama.vocab_size", 258, UINT),
    )
    data = bytearray(path.read_bytes())
    data[4] = 1
    path.write_bytes(data)
    refused(path, "has GGUF version 1, of August 2023; convert the model again")
