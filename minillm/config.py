"""What defines a decoder: one frozen dataclass, and the published models the lessons count.

Two families are described here. The first (RMSNorm, rotary positions, SwiGLU: Llama, Mistral,
Qwen2, Qwen3) can be *run* by `minillm.model.Decoder`. The second (LayerNorm, learned positions, a
two-matrix feed-forward network: GPT-3, OPT) can only be *counted* by `minillm.costs`, because the
lessons compare against it.

Sources: Touvron et al. 2023 (Llama 2), Jiang et al. 2023 (Mistral 7B), Dubey et al. 2024 (Llama 3),
Yang et al. 2024/2025 (Qwen2, Qwen3), Brown et al. 2020 Table 2.1 (GPT-3), Zhang et al. 2022 Table 1
(OPT); exact sizes from each model's published config.json.
Not here: mixture of experts, sliding windows, multi-head latent attention, and any rope scaling
other than Llama 3's. Such a config is refused by name.
"""

import math
from dataclasses import dataclass
from typing import Any

from minillm.checks import brief

# Upper limits for numbers from files that others wrote: far above any published model, and low
# enough that no arithmetic on them can hang or overflow.
_LIMITS = {
    "n_layers": 1024, "d_model": 1 << 17, "n_heads": 4096, "n_kv_heads": 4096, "d_head": 4096,
    "d_ff": 1 << 20, "vocab_size": 1 << 22, "max_seq_len": 1 << 27,
}  # fmt: skip

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("swiglu", "gelu", "relu"),
    "positions": ("rope", "learned"),
}


def _check_size(field: str, value: Any) -> None:
    most = _LIMITS[field]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{field} is {brief(value)}; it must be a whole number from 1 to {most}.")


def _is_positive(value: Any) -> bool:
    """True for a positive number that is neither 0 nor infinite in float32, nor next to it."""
    return type(value) in (int, float) and 1e-30 <= value <= 1e30


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; the first seven fields are L, C, H, K, D, F and V.

    Raises ValueError when a size is out of range or two fields contradict each other.
    """

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
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} is {brief(value)}; choose one of {', '.join(allowed)}.")
        if self.positions == "rope" and self.d_head % 2:
            raise ValueError(
                f"d_head is {self.d_head}; rotary positions turn pairs, so it must be even."
            )
        for field in ("norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not _is_positive(value):
                raise ValueError(
                    f"{field} is {brief(value)}; it must be a positive number, 1e-30 to 1e30."
                )
        if self.rope_factors is not None:
            if len(self.rope_factors) != self.d_head // 2:
                raise ValueError(
                    f"rope_factors has {len(self.rope_factors)} entries; d_head {self.d_head} "
                    f"needs {self.d_head // 2}."
                )
            if not all(map(_is_positive, self.rope_factors)):
                raise ValueError("rope_factors must be positive numbers, 1e-30 to 1e30.")

    @property
    def runnable(self) -> bool:
        """True for the family that `Decoder` implements; the other family can be counted only."""
        family = (self.norm, self.mlp, self.positions)
        return family == ("rmsnorm", "swiglu", "rope") and not self.mlp_bias

    @staticmethod
    def preset(name: str) -> "ModelConfig":
        """One of the published models in `PRESETS`, by name; ValueError for any other name."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return PRESETS[name]

    @staticmethod
    def from_hf(raw: dict[str, Any], name: str = "custom") -> "ModelConfig":
        """A Hugging Face `config.json` (already parsed) as a `ModelConfig`.

        Accepts model_type llama, mistral, qwen2 and qwen3 with full attention, in the spelling of
        transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Raises ValueError
        naming what is not implemented.
        """
        if not isinstance(raw, dict):
            raise ValueError(
                f"The config is a {type(raw).__name__}; config.json must hold one JSON object."
            )
        kind = raw.get("model_type")
        if kind not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(
                f"model_type {brief(kind)} is not implemented; supported are llama, mistral, "
                "qwen2 and qwen3."
            )
        _refuse_unsupported(raw, kind)

        n_heads, d_model = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size")
        if raw.get("head_dim") is None and (n_heads < 1 or d_model % n_heads):
            raise ValueError(
                f"hidden_size {brief(d_model)} is not a multiple of num_attention_heads "
                f"{brief(n_heads)}, and head_dim is not given."
            )
        # Qwen3 has always had heads of its own size; the others derive it unless the file says so.
        usual = 128 if kind == "qwen3" else d_model // max(1, n_heads)
        d_head = _integer(raw, "head_dim", usual)
        _check_size("d_head", d_head)  # before a list of D/2 factors is made
        bias = _flag(raw, "attention_bias")
        theta, factors = _rope(raw, d_head)
        return ModelConfig(
            n_layers=_integer(raw, "num_hidden_layers"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=_integer(raw, "num_key_value_heads", n_heads),
            d_head=d_head,
            d_ff=_integer(raw, "intermediate_size"),
            vocab_size=_integer(raw, "vocab_size"),
            max_seq_len=_integer(raw, "max_position_embeddings", 2048),
            name=name,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_factors=factors,
            qkv_bias=kind == "qwen2" or bias,
            attn_out_bias=kind != "qwen2" and bias,
            qk_norm=kind == "qwen3",
            tie_embeddings=_flag(raw, "tie_word_embeddings"),
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


def _refuse_unsupported(raw: dict[str, Any], kind: str) -> None:
    """Raise ValueError for each switch that would change the mathematics and is not implemented."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or any(
        not str(name).endswith("ForCausalLM") for name in architectures
    ):
        raise ValueError(
            f"architectures {brief(architectures)} is not implemented; only a ...ForCausalLM model "
            "can be loaded."
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(
            f"hidden_act {brief(activation)} is not implemented; the feed-forward network uses "
            "silu."
        )
    if raw.get("mlp_bias"):
        raise ValueError(
            "mlp_bias is not implemented; only models without biases in the feed-forward network "
            "can be loaded."
        )
    if raw.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config is set; load the unquantized checkpoint, or a GGUF file."
        )
    _refuse_partial_rotation(raw)
    window = raw.get("sliding_window")
    windowed = window is not None and (kind == "mistral" or raw.get("use_sliding_window", False))
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json has layer_types = {brief(layer_types)}; it must be a list.")
    if windowed or any(t != "full_attention" for t in layer_types):
        raise ValueError(
            f"sliding_window {brief(window)} is not implemented; only full attention can be run."
        )


def _refuse_partial_rotation(parameters: dict[str, Any]) -> None:
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor != 1.0:
        raise ValueError(
            f"partial_rotary_factor {brief(factor)} is not implemented; all of D must be rotated."
        )


def _rope(raw: dict[str, Any], d_head: int) -> tuple[float, tuple[float, ...] | None]:
    """(theta, factors) from `rope_theta` and `rope_scaling`, or from `rope_parameters`."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is not None and not isinstance(part, dict):
            raise ValueError(f"config.json has {key} = {brief(part)}; it must be an object.")
        merged |= part or {}
    theta = merged.get("rope_theta", raw.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 1 < theta < 1e30:
        raise ValueError(f"rope_theta is {brief(theta)}; it must be a number above 1.")
    _refuse_partial_rotation(merged)
    rope_type = merged.get("rope_type", merged.get("type", "default"))
    if rope_type == "default":
        return float(theta), None
    if rope_type != "llama3":
        raise ValueError(
            f"rope scaling {brief(rope_type)} is not implemented; supported are default and llama3."
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = [merged.get(key) for key in keys]
    if not all(map(_is_positive, values)) or values[2] <= values[1]:
        raise ValueError(
            "rope scaling llama3 needs positive factor, low_freq_factor, high_freq_factor (the "
            f"larger) and original_max_position_embeddings; config.json has {brief(values)}."
        )
    return float(theta), llama3_rope_factors(theta, d_head, *values)


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


def _gpt(
    name: str, L: int, C: int, H: int, vocab_size: int, mlp: str, position_rows: int
) -> ModelConfig:
    """The LayerNorm, learned-position family: F = 4C, a bias on every matrix, tied embeddings."""
    return ModelConfig(
        L, C, H, H, C // H, 4 * C, vocab_size, 2048, name=name,
        norm="layernorm", mlp=mlp, positions="learned", qkv_bias=True, attn_out_bias=True,
        mlp_bias=True, tie_embeddings=True, n_position_rows=position_rows,
    )  # fmt: skip


#                       L    C    H   K   D     F      V      positions
PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        _gpt("gpt3-175b", 96, 12288, 96, 50257, "gelu", 2048),
        # OPT's table of positions has two rows more than positions.
        _gpt("opt-13b", 40, 5120, 40, 50272, "relu", 2050),
        ModelConfig(32, 4096, 32, 32, 128, 11008, 32000, 4096, name="llama-2-7b"),
        ModelConfig(80, 8192, 64, 8, 128, 28672, 32000, 4096, name="llama-2-70b"),
        # Version 0.2: the first one (0.1) had a sliding window.
        ModelConfig(32, 4096, 32, 8, 128, 14336, 32000, 32768, name="mistral-7b", rope_theta=1e6),
        ModelConfig(32, 4096, 32, 8, 128, 14336, 128256, 8192, name="llama-3-8b", rope_theta=5e5),
        ModelConfig(30, 576, 9, 3, 64, 1536, 49152, 8192, name="smollm2-135m", rope_theta=1e5,
                    tie_embeddings=True),
        ModelConfig(28, 1024, 16, 8, 128, 3072, 151936, 40960, name="qwen3-0.6b", rope_theta=1e6,
                    norm_eps=1e-6, qk_norm=True, tie_embeddings=True),
    )
}  # fmt: skip
