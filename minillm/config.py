"""What defines a decoder: one frozen dataclass, and the published models the lessons count.

Two families are described here. The first (RMSNorm, rotary positions, SwiGLU: Llama, Mistral, Qwen2, Qwen3)
can be *run* by `minillm.model.Decoder`. The second (LayerNorm, learned positions, a two-matrix feed-forward
network: GPT-3, OPT) can only be *counted* by `minillm.costs`, because the lessons compare against it.

Sources: Touvron et al. 2023 (Llama 2), Jiang et al. 2023 (Mistral 7B), Dubey et al. 2024 (Llama 3), Yang et al.
2024/2025 (Qwen2, Qwen3), Brown et al. 2020 Table 2.1 (GPT-3), Zhang et al. 2022 Table 1 (OPT); exact sizes from
each model's published config.json.
What this file does not do: mixture of experts, sliding windows, multi-head latent attention, any other rope
scaling than Llama 3's. Such a config is refused by name.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

# Upper limits for numbers that come from somebody else's file: far above any published model, low enough that
# no arithmetic on them can hang or overflow.
_LIMITS = {
    "n_layers": 1024, "d_model": 1 << 17, "n_heads": 4096, "n_kv_heads": 4096, "d_head": 4096,
    "d_ff": 1 << 20, "vocab_size": 1 << 22, "max_seq_len": 1 << 27,
}  # fmt: skip


def _check_size(field: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= _LIMITS[field]:
        raise ValueError(f"{field} is {value!r}; it must be a whole number from 1 to {_LIMITS[field]}.")


def _is_positive(value: Any) -> bool:
    """True for a positive number that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder. Letters of the course: L, C, H, K, D, F, V are the first seven fields."""

    n_layers: int  # L
    d_model: int  # C, the width of the residual stream
    n_heads: int  # H, query heads
    n_kv_heads: int  # K, key/value heads; H is a multiple of K
    d_head: int  # D; usually C / H, but Qwen3 chooses its own
    d_ff: int  # F
    vocab_size: int  # V
    max_seq_len: int  # positions the model was trained for
    name: str = "custom"
    norm: str = "rmsnorm"  # or "layernorm"
    mlp: str = "swiglu"  # or "gelu", "relu": two matrices instead of three
    positions: str = "rope"  # or "learned": a table of `n_position_rows` rows
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None  # (D/2,) divisors of the rotary frequencies
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over D on q and k (Qwen3)
    tie_embeddings: bool = False
    n_position_rows: int = 0

    def __post_init__(self) -> None:
        for field in _LIMITS:
            _check_size(field, getattr(self, field))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}; "
                "every key/value head serves the same number of query heads."
            )
        for field, allowed in (
            ("norm", ("rmsnorm", "layernorm")),
            ("mlp", ("swiglu", "gelu", "relu")),
            ("positions", ("rope", "learned")),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; choose one of {', '.join(allowed)}.")
        if self.positions == "rope" and self.d_head % 2:
            raise ValueError(f"d_head is {self.d_head}; rotary positions turn pairs, so it must be even.")
        for field in ("norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not _is_positive(value):
                raise ValueError(f"{field} is {value!r}; it must be a positive number.")
        if self.rope_factors is not None:
            if len(self.rope_factors) != self.d_head // 2:
                raise ValueError(f"rope_factors has {len(self.rope_factors)} entries; d_head {self.d_head} needs {self.d_head // 2}.")
            if not all(map(_is_positive, self.rope_factors)):
                raise ValueError("rope_factors must be positive finite numbers.")

    @property
    def runnable(self) -> bool:
        """True for the family that `Decoder` implements; the other family can be counted only."""
        return (self.norm, self.mlp, self.positions) == ("rmsnorm", "swiglu", "rope") and not self.mlp_bias

    @staticmethod
    def preset(name: str) -> "ModelConfig":
        """One of the published models in `PRESETS`, by name."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return PRESETS[name]

    @staticmethod
    def from_hf(raw: dict[str, Any], name: str = "custom") -> "ModelConfig":
        """A Hugging Face `config.json` (already parsed) as a `ModelConfig`.

        Accepts model_type llama, mistral, qwen2 and qwen3 with full attention, in the spelling of transformers 4
        (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Raises ValueError naming what is not implemented.
        """
        if not isinstance(raw, dict):
            raise ValueError(f"The config is a {type(raw).__name__}; config.json must hold one JSON object.")
        kind = raw.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"model_type {kind!r} is not implemented; supported are llama, mistral, qwen2 and qwen3.")
        _refuse_unsupported(raw, kind)

        def integer(key: str, default: int | None = None) -> int:
            value = raw.get(key)
            value = default if value is None else value
            if type(value) is not int:
                raise ValueError(f"config.json has {key} = {value!r}; it must be a whole number.")
            return value

        def flag(key: str, default: bool) -> bool:
            value = raw.get(key)
            value = default if value is None else value
            if type(value) is not bool:
                raise ValueError(f"config.json has {key} = {value!r}; it must be true or false.")
            return value

        n_heads, d_model = integer("num_attention_heads"), integer("hidden_size")
        if raw.get("head_dim") is None and (n_heads < 1 or d_model % n_heads):
            raise ValueError(f"hidden_size {d_model} is not a multiple of num_attention_heads {n_heads}, and head_dim is not given.")
        # Qwen3 has always had heads of its own size; the others derive it unless the file says otherwise.
        d_head = integer("head_dim", 128 if kind == "qwen3" else d_model // max(1, n_heads))
        _check_size("d_head", d_head)  # before a list of D/2 factors is made
        bias = flag("attention_bias", False)
        theta, factors = _rope(raw, d_head)
        return ModelConfig(
            n_layers=integer("num_hidden_layers"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=integer("num_key_value_heads", n_heads),
            d_head=d_head,
            d_ff=integer("intermediate_size"),
            vocab_size=integer("vocab_size"),
            max_seq_len=integer("max_position_embeddings", 2048),
            name=name,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_factors=factors,
            qkv_bias=kind == "qwen2" or bias,
            attn_out_bias=kind != "qwen2" and bias,
            qk_norm=kind == "qwen3",
            tie_embeddings=flag("tie_word_embeddings", False),
        )


def _refuse_unsupported(raw: dict[str, Any], kind: str) -> None:
    """Raise ValueError for every switch of the four families that would change the mathematics and is not built."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or any(not str(a).endswith("ForCausalLM") for a in architectures):
        raise ValueError(f"architectures {architectures!r} is not implemented; only a ...ForCausalLM model can be loaded.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not implemented; the feed-forward network uses silu.")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is not implemented; only models without biases in the feed-forward network can be loaded.")
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; load the unquantized checkpoint, or a GGUF file.")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {raw['partial_rotary_factor']!r} is not implemented; all of D must be rotated.")
    windowed = raw.get("sliding_window") is not None and (kind == "mistral" or raw.get("use_sliding_window", False))
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json has layer_types = {layer_types!r}; it must be a list.")
    if windowed or any(t != "full_attention" for t in layer_types):
        raise ValueError(f"sliding_window {raw.get('sliding_window')!r} is not implemented; only full attention can be run.")


def _rope(raw: dict[str, Any], d_head: int) -> tuple[float, tuple[float, ...] | None]:
    """(theta, factors) from `rope_theta` and `rope_scaling`, or from transformers 5's `rope_parameters`."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is not None and not isinstance(part, dict):
            raise ValueError(f"config.json has {key} = {part!r}; it must be an object.")
        merged |= part or {}
    theta = merged.get("rope_theta", raw.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 1 < theta < 1e30:
        raise ValueError(f"rope_theta is {theta!r}; it must be a number above 1.")
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {merged['partial_rotary_factor']!r} is not implemented; all of D must be rotated.")
    rope_type = merged.get("rope_type", merged.get("type", "default"))
    if rope_type == "default":
        return float(theta), None
    if rope_type != "llama3":
        raise ValueError(f"rope scaling {rope_type!r} is not implemented; supported are default and llama3.")
    values = [merged.get(k) for k in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")]
    if not all(map(_is_positive, values)) or values[2] <= values[1]:
        raise ValueError(
            "rope scaling llama3 needs positive factor, low_freq_factor, high_freq_factor (the larger) and "
            f"original_max_position_embeddings; config.json has {values!r}."
        )
    return float(theta), llama3_rope_factors(theta, d_head, *values)


def llama3_rope_factors(theta: float, d_head: int, factor: float, low: float, high: float, original_len: float) -> tuple[float, ...]:
    """Divisors (D/2,) of the rotary frequencies in Llama 3.1's context extension.

    Dubey et al. 2024, section 3.4.2, as published with the weights: wavelengths shorter than original_len/high stay,
    those longer than original_len/low are slowed by `factor`, and between the two the *frequency* is interpolated.
    """
    factors = []
    for i in range(d_head // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / d_head)
        smooth = min(1.0, max(0.0, (original_len / wavelength - low) / (high - low)))  # 1: keep, 0: slow fully
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def _gpt(name: str, n_layers: int, d_model: int, n_heads: int, vocab_size: int, mlp: str, position_rows: int) -> ModelConfig:
    """The LayerNorm, learned-position family: d_ff = 4C, a bias on every matrix, tied embeddings."""
    return ModelConfig(
        n_layers, d_model, n_heads, n_heads, d_model // n_heads, 4 * d_model, vocab_size, 2048, name=name,
        norm="layernorm", mlp=mlp, positions="learned", qkv_bias=True, attn_out_bias=True, mlp_bias=True,
        tie_embeddings=True, n_position_rows=position_rows,
    )  # fmt: skip


#                       L    C    H   K   D     F      V      positions
PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        _gpt("gpt3-175b", 96, 12288, 96, 50257, "gelu", 2048),
        _gpt("opt-13b", 40, 5120, 40, 50272, "relu", 2050),  # OPT's table has two rows more than positions
        ModelConfig(32, 4096, 32, 32, 128, 11008, 32000, 4096, name="llama-2-7b"),
        ModelConfig(80, 8192, 64, 8, 128, 28672, 32000, 4096, name="llama-2-70b"),
        # Version 0.2: the first one (0.1) had a sliding window.
        ModelConfig(32, 4096, 32, 8, 128, 14336, 32000, 32768, name="mistral-7b", rope_theta=1e6),
        ModelConfig(32, 4096, 32, 8, 128, 14336, 128256, 8192, name="llama-3-8b", rope_theta=5e5),
        ModelConfig(30, 576, 9, 3, 64, 1536, 49152, 8192, name="smollm2-135m", rope_theta=1e5, tie_embeddings=True),
        ModelConfig(28, 1024, 16, 8, 128, 3072, 151936, 40960, name="qwen3-0.6b", rope_theta=1e6, norm_eps=1e-6,
                    qk_norm=True, tie_embeddings=True),
    )
}  # fmt: skip
