"""config.json of a Hugging Face checkpoint: read here, and refused where it cannot be run.

Sources: the configuration classes of transformers 4 and 5; Dubey et al. 2024, section 3.4.2, for
Llama 3's rope scaling.
The file is untrusted: each number is checked, and whatever would change the mathematics and is not
implemented is refused by name, never run wrongly.
Not here: sliding windows, rope scaling other than Llama 3's, rotation of only a part of D.
"""

import math
from typing import Any

from minillm.config import ModelConfig, check_size, is_positive
from minillm.tools.checks import brief

# What a missing key means, which differs by model_type: the defaults of transformers' configuration
# classes. Other keys have one default for all four, or none.
_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # Llama: as many as query heads
_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}  # Llama has no windows

# Reading


def from_hf(raw: dict[str, Any], name: str = "custom") -> ModelConfig:
    """A Hugging Face `config.json` (already parsed) as a `ModelConfig`.

    Accepts model_type llama, mistral, qwen2 and qwen3 with full attention, in the spelling of
    transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Raises ValueError
    naming what is not implemented.
    """
    kind = _model_type(raw)
    max_seq_len = _integer(raw, "max_position_embeddings", _POSITIONS[kind])
    _refuse_unsupported(raw, kind, max_seq_len)
    n_heads, d_model = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size")
    d_head = _head_dim(raw, kind, n_heads, d_model)
    bias = _flag(raw, "attention_bias")
    theta, factors = _rope(raw, d_head)
    return ModelConfig(
        n_layers=_integer(raw, "num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_kv_heads(raw, kind, n_heads),
        d_head=d_head,
        d_ff=_integer(raw, "intermediate_size"),
        vocab_size=_integer(raw, "vocab_size"),
        max_seq_len=max_seq_len,
        name=name,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factors=factors,
        # Qwen2 always has biases on q, k and v, and none on the output.
        qkv_bias=kind == "qwen2" or bias,
        attn_out_bias=kind != "qwen2" and bias,
        qk_norm=kind == "qwen3",
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
    )


def _model_type(raw: dict[str, Any]) -> str:
    if not isinstance(raw, dict):
        raise ValueError(
            f"The config is a {type(raw).__name__}; config.json must hold one JSON object."
        )
    kind = raw.get("model_type")
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(
            f"model_type {brief(kind)} is not implemented; only llama, mistral, qwen2 and qwen3 "
            "are supported."
        )
    return kind


def _head_dim(raw: dict[str, Any], kind: str, n_heads: int, d_model: int) -> int:
    """D: as the file gives it, or derived from C and H."""
    if raw.get("head_dim") is None and (n_heads < 1 or d_model % n_heads):
        raise ValueError(
            f"hidden_size {brief(d_model)} is not a multiple of num_attention_heads "
            f"{brief(n_heads)}, and head_dim is not given."
        )
    # Qwen3's default is a fixed number; the others divide the width among the heads.
    default = 128 if kind == "qwen3" else d_model // max(1, n_heads)
    d_head = _integer(raw, "head_dim", default)
    check_size("d_head", d_head)  # before a list of D/2 factors is made
    return d_head


def _kv_heads(raw: dict[str, Any], kind: str, n_heads: int) -> int:
    """K: a missing key means the family's own number, null as many as there are query heads."""
    missing = "num_key_value_heads" not in raw
    return _integer(
        raw, "num_key_value_heads", _KV_HEADS.get(kind, n_heads) if missing else n_heads
    )


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise ValueError(f"config.json has {key} = {brief(value)}; it must be a whole number.")
    return value


def _flag(raw: dict[str, Any], key: str) -> bool:
    """The boolean under `key`; False where it is missing or null."""
    value = raw.get(key)
    value = False if value is None else value
    if type(value) is not bool:
        raise ValueError(f"config.json has {key} = {brief(value)}; it must be true or false.")
    return value


def _rope(raw: dict[str, Any], d_head: int) -> tuple[float, tuple[float, ...] | None]:
    """Theta and, for Llama 3's scaling, the (D/2,) divisors of the rotary frequencies."""
    parameters = _rope_parameters(raw)
    theta = parameters.get("rope_theta", raw.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 1 < theta < 1e30:
        raise ValueError(f"rope_theta is {brief(theta)}; it must be a number above 1.")
    _refuse_partial_rotation(parameters)
    rope_type = parameters.get("rope_type", parameters.get("type"))
    rope_type = "default" if rope_type is None else rope_type
    if rope_type == "default":
        return float(theta), None
    if rope_type != "llama3":
        raise ValueError(
            f"rope scaling {brief(rope_type)} is not implemented; only default and llama3 are "
            "supported."
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = [parameters.get(key) for key in keys]
    if not all(map(is_positive, values)) or values[2] <= values[1]:
        raise ValueError(
            "rope scaling llama3 needs positive factor, low_freq_factor, high_freq_factor (the "
            f"larger) and original_max_position_embeddings; config.json has {brief(values)}."
        )
    return float(theta), llama3_rope_factors(theta, d_head, *values)


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` of transformers 4, or `rope_parameters` of 5; the first if both are there."""
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is not None and not isinstance(part, dict):
            raise ValueError(f"config.json has {key} = {brief(part)}; it must be an object.")
        if any(isinstance(value, dict) for value in (part or {}).values()):
            raise ValueError(
                f"config.json has {key} = {brief(part)}; rotary positions that differ by layer are "
                "not implemented."
            )
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def llama3_rope_factors(
    theta: float, d_head: int, factor: float, low: float, high: float, original_len: float
) -> tuple[float, ...]:
    """Divisors (D/2,) of the rotary frequencies in Llama 3.1's context extension.

    Dubey et al. 2024, section 3.4.2, as published with the weights: wavelengths shorter than
    original_len/high stay, those longer than original_len/low are slowed by `factor`, and between
    the two the *frequency* is interpolated.
    """
    factors = []
    for i in range(d_head // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / d_head)
        # 1 keeps the frequency, 0 slows it by the whole factor.
        keep = min(1.0, max(0.0, (original_len / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - keep) / factor + keep))
    return tuple(factors)


# Refusals


def _refuse_unsupported(raw: dict[str, Any], kind: str, max_seq_len: int) -> None:
    """Raise ValueError for each switch that would change the mathematics and is not implemented."""
    _refuse_other_architectures(raw)
    _refuse_other_mlps(raw)
    if raw.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config is set; load the unquantized checkpoint, or a GGUF file."
        )
    _refuse_partial_rotation(raw)
    _refuse_sliding_windows(raw, kind, max_seq_len)
    if raw.get("is_causal", True) is not True:
        raise ValueError(
            f"is_causal {brief(raw['is_causal'])} is not implemented; only models whose tokens "
            "look at earlier ones can be run."
        )


def _refuse_other_architectures(raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    if not isinstance(architectures, list) or any(
        not str(name).endswith("ForCausalLM") for name in architectures
    ):
        raise ValueError(
            f"architectures {brief(architectures)} is not implemented; only a ...ForCausalLM model "
            "can be loaded."
        )


def _refuse_other_mlps(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise ValueError(
            f"hidden_act {brief(activation)} is not implemented; the feed-forward network uses "
            "silu."
        )
    if raw.get("mlp_bias"):
        raise ValueError(
            "mlp_bias is not implemented; only models without biases in the feed-forward network "
            "can be loaded."
        )


def _refuse_partial_rotation(parameters: dict[str, Any]) -> None:
    factor = parameters.get("partial_rotary_factor")
    if factor not in (None, 1.0):  # some files have null
        raise ValueError(
            f"partial_rotary_factor {brief(factor)} is not implemented; all of D must be rotated."
        )


def _refuse_sliding_windows(raw: dict[str, Any], kind: str, max_seq_len: int) -> None:
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json has layer_types = {brief(layer_types)}; it must be a list.")
    if any(t != "full_attention" for t in layer_types):
        raise ValueError(
            f"layer_types {brief(layer_types)} is not implemented; only full attention can be run."
        )
    window = raw.get("sliding_window", _WINDOW.get(kind))
    # Only Mistral turns its window on by naming it; Qwen has a switch, which is off by default.
    if window is None or not (kind == "mistral" or raw.get("use_sliding_window")):
        return
    if type(window) is not int or window < max_seq_len:  # a longer one never hides a token
        default = "" if "sliding_window" in raw else f", the default of {kind},"
        raise ValueError(
            f"sliding_window {brief(window)}{default} is not implemented: only full attention can "
            "be run. If the model was trained without a window, set sliding_window to null in "
            "config.json; else lower max_position_embeddings to the window."
        )
