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

from dataclasses import dataclass
from typing import Any

from minillm.tools.checks import brief

# Upper limits for sizes read from untrusted files: far above any published model, and low enough
# that no arithmetic on them can hang or overflow.
_LIMITS = {
    "n_layers": 1024, "d_model": 1 << 17, "n_heads": 4096, "n_kv_heads": 4096, "d_head": 4096,
    "d_ff": 1 << 20, "vocab_size": 1 << 22, "max_seq_len": 1 << 27,
}  # fmt: skip

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("swiglu", "gelu", "relu"),
    "positions": ("rope", "learned"),
}


def check_size(field: str, value: Any) -> None:
    """Raise ValueError unless `value` is a whole number within the limit of that field."""
    most = _LIMITS[field]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{field} is {brief(value)}; it must be a whole number from 1 to {most}.")


def is_positive(value: Any) -> bool:
    """True for a positive number that is well away from 0 and infinity in float32."""
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
    d_head: int  # D; usually C / H, but Qwen3 sets it separately
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
        # Sizes
        for field in _LIMITS:
            check_size(field, getattr(self, field))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}; "
                "every key/value head serves the same number of query heads."
            )
        # Switches
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} is {brief(value)}; choose one of {', '.join(allowed)}.")
        if self.positions == "rope" and self.d_head % 2:
            raise ValueError(
                f"d_head is {self.d_head}; rotary positions turn pairs, so it must be even."
            )
        # Real numbers
        for field in ("norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not is_positive(value):
                raise ValueError(
                    f"{field} is {brief(value)}; it must be a positive number, 1e-30 to 1e30."
                )
        if self.rope_factors is not None:
            self._check_rope_factors(self.rope_factors)

    def _check_rope_factors(self, factors: tuple[float, ...]) -> None:
        if len(factors) != self.d_head // 2:
            raise ValueError(
                f"rope_factors has {len(factors)} entries; d_head {self.d_head} needs "
                f"{self.d_head // 2}."
            )
        if not all(map(is_positive, factors)):
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
        # OPT's position table has two more rows than there are positions.
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
