"""The metadata of a GGUF file as a `ModelConfig`, refused where it cannot be run.

Sources: the GGUF specification (docs/gguf.md of ggml); for defaults and for the rotary scaling
`llama_model::load_hparams` of llama.cpp.
Of the keys that can change the mathematics only known ones pass: a key that is not known here must
have a value that switches it off.
"""

from pathlib import Path
from typing import Any

from minillm.config import ModelConfig
from minillm.hf_config import from_hf
from minillm.tools.checks import brief

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ANY = object()
# Keys below "{arch}." and the value that each must have; _ANY for those that are read, or checked
# elsewhere, or change nothing.
_KNOWN = {
    "attention.head_count": _ANY, "attention.head_count_kv": _ANY, "attention.key_length": _ANY,
    "attention.value_length": _ANY, "attention.layer_norm_rms_epsilon": _ANY,
    "attention.layer_norm_epsilon": _ANY,  # of LayerNorm, which these models do not have
    "attention.causal": True,
    "rope.dimension_count": _ANY, "rope.freq_base": _ANY, "rope.scaling.type": _ANY,
    "rope.scaling.factor": _ANY, "rope.scale_linear": _ANY, "rope.scaling.attn_factor": 1,
    # What the model was trained with; and two parameters of yarn, which is refused by its type
    "rope.scaling.finetuned": _ANY, "rope.scaling.original_context_length": _ANY,
    "rope.scaling.yarn_beta_fast": _ANY, "rope.scaling.yarn_beta_slow": _ANY,
    "rope.scaling.yarn_attn_factor": 1,
}  # fmt: skip
# Other keys are checked if they begin so, or are one of these.
_CHECKED = ("attention.", "rope.")
_SWITCHES = (
    "expert_count", "logit_scale", "residual_scale", "embedding_scale", "attn_logit_softcapping",
    "final_logit_softcapping", "use_parallel_residual",
)  # fmt: skip


def config_from_gguf(path: Path, fields: dict[str, Any], names: set[str]) -> ModelConfig:
    """The config of a GGUF file. fields: its metadata; names: its tensors.

    Raises ValueError that names the file and the key for what is missing or not implemented.
    """
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ValueError(
            f"{path} has the architecture {brief(arch)}; only llama, qwen2 and qwen3 are supported."
        )
    _refuse_unsupported(path, fields, arch)
    try:
        config = from_hf(_as_hf_config(path, fields, names, arch), name=path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for key, what in (
        ("rope.dimension_count", "rotates"),
        ("attention.value_length", "keeps values for"),
    ):
        value = fields.get(f"{arch}.{key}", config.d_head)
        if value != config.d_head:
            raise ValueError(
                f"{path} {what} {brief(value)} of {config.d_head} dimensions of a head "
                f"({arch}.{key}), which is not implemented."
            )
    return config


def _as_hf_config(path: Path, fields: dict[str, Any], names: set[str], arch: str) -> dict[str, Any]:
    """The metadata in the words of config.json, so that both formats share one reader."""

    def whole(key: str, default: int | None = None) -> int:
        return _whole(path, f"{arch}.{key}", fields.get(f"{arch}.{key}", default))

    n_heads, width = whole("attention.head_count"), whole("embedding_length")
    tokens = fields.get("tokenizer.ggml.tokens")
    return {
        "model_type": arch,
        "num_hidden_layers": whole("block_count"),
        "hidden_size": width,
        "num_attention_heads": n_heads,
        "num_key_value_heads": whole("attention.head_count_kv", n_heads),
        "head_dim": whole("attention.key_length", width // max(1, n_heads)),
        "intermediate_size": whole("feed_forward_length"),
        "vocab_size": whole("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": fields[f"{arch}.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in names,
    }


def _whole(path: Path, key: str, value: Any) -> int:
    """A whole number; also from a list with an entry for each layer, if all are the same."""
    if value is None:
        raise ValueError(f"{path} lacks {key}; convert the model again.")
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if type(value) is not int:
        hint = "layers of different sizes are not implemented" if isinstance(value, list) else ""
        raise ValueError(
            f"{path} has {key} = {brief(value)}; {hint or 'it must be a whole number'}."
        )
    return value


def _refuse_unsupported(path: Path, fields: dict[str, Any], arch: str) -> None:
    """Raise ValueError for keys that would change the mathematics and are not implemented."""
    _refuse_rope_scaling(path, fields, arch)
    for full, value in fields.items():
        key = full.removeprefix(f"{arch}.")
        if full.startswith("tokenizer.ggml.add_"):
            wrong = value and full != "tokenizer.ggml.add_bos_token"
        elif key == full or not (key.startswith(_CHECKED) or key in _SWITCHES):
            continue
        elif key in _KNOWN:
            wrong = _KNOWN[key] is not _ANY and value != _KNOWN[key]
        else:
            wrong = _is_on(value)
        if wrong:
            raise ValueError(
                f"{path} sets {brief(full)} = {brief(value)}, which is not implemented; take a "
                "model without it."
            )
    if f"{arch}.attention.layer_norm_rms_epsilon" not in fields:
        raise ValueError(f"{path} lacks {arch}.attention.layer_norm_rms_epsilon; fetch it again.")


def _is_on(value: Any) -> bool:
    """False for 0, False, an empty text, and lists of nothing else."""
    return any(map(_is_on, value)) if isinstance(value, list) else bool(value)


def _refuse_rope_scaling(path: Path, fields: dict[str, Any], arch: str) -> None:
    """Raise ValueError for scaled positions; the default type, and 0 for none, are llama.cpp's."""
    kind = fields.get(f"{arch}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{path} uses rope scaling {brief(kind)}, which is not implemented for GGUF files."
        )
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        factor = fields.get(f"{arch}.{key}", 1)
        if kind == "linear" and factor not in (0, 1):
            raise ValueError(
                f"{path} sets {arch}.{key} = {brief(factor)}: linear rope scaling is not "
                "implemented."
            )
