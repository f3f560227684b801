"""The decoder: RMSNorm, rotary positions, attention, SwiGLU. The one model every technique plugs into.

Sources: Touvron et al. 2023 (Llama), section 2.2; Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021 (RoPE); Shazeer 2020
(SwiGLU); Yang et al. 2025 (Qwen3: RMSNorm on q and k).
Cost: 2 FLOPs per matrix parameter and token, see `minillm.costs`.

Everything here is per token. Whatever looks at other tokens is one call, `cache.attend(layer, q, k, v)`; so a
technique replaces the cache, or swaps a Linear for another module, and never edits this file.
Activations are (B, T, C). The matrices for q, k and v are one Linear, as are gate and up: one large product keeps
the memory bus busier than three small ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.kv_cache import Cache, NoCache


def _small_random(weight: Tensor) -> None:
    """Normal with standard deviation 0.02, as in GPT-2. Nothing on the meta device, where only shapes are wanted."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=0.02)


class Linear(nn.Linear):
    """nn.Linear with small random weights and a zero bias."""

    def reset_parameters(self) -> None:
        _small_random(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding with small random weights."""

    def reset_parameters(self) -> None:
        _small_random(self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(config: ModelConfig, start: int, end: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for positions start … end - 1, each (T, 1, D): the same for every head, the angle of each pair twice.

    Pair i of D/2 turns by position * theta^(-2i/D) (Su et al. 2021, equation 15). The sine carries the sign of the
    rotation: minus for the first half of D, plus for the second.
    """
    pairs = torch.arange(0, config.d_head, 2, device=device, dtype=torch.float32) / config.d_head
    frequencies = 1.0 / config.rope_theta**pairs  # (D/2,)
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, device=device)
    angles = torch.arange(start, end, device=device, dtype=torch.float32)[:, None, None] * frequencies  # (T, 1, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x (B, T, heads, D) by its angle."""
    # The rotation needs the other half of each pair: rolling by D/2 swaps the halves.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Projections and rotary positions around `cache.attend`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = self.config = config
        self.qkv = Linear(c.d_model, (c.n_heads + 2 * c.n_kv_heads) * c.d_head, bias=c.qkv_bias)
        self.out = Linear(c.n_heads * c.d_head, c.d_model, bias=c.attn_out_bias)
        self.q_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, layer: int, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        H, K, D = self.config.n_heads, self.config.n_kv_heads, self.config.d_head
        qkv = self.qkv(x).unflatten(-1, (H + 2 * K, D))  # (B, T, H + 2K, D)
        if self.q_norm is None:
            qk, v = qkv.split((H + K, K), dim=-2)
            q, k = apply_rope(qk, *rope).split((H, K), dim=-2)  # q and k turn together, in one call
        else:
            q, k, v = qkv.split((H, K, K), dim=-2)
            q, k = apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope)
        return self.out(cache.attend(layer, q, k, v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        x = x + self.attn(self.attn_norm(x), layer, rope, cache)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder-only language model with random weights; `minillm.load` fills in a checkpoint's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not config.runnable:
            raise ValueError(
                f"{config.name} ({config.norm}, {config.mlp}, {config.positions} positions) can be counted but not run; "
                "Decoder implements RMSNorm, SwiGLU and rotary positions."
            )
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids (B, T) to the last layer's normalized states (B, T, C); `head` turns those into logits."""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; expected integer ids (B, T).")
        if tokens.shape[1] == 0:
            raise ValueError("tokens is empty; give at least one token.")
        cache = NoCache() if cache is None else cache
        start, end = cache.positions(tokens.shape[1])
        if end > self.config.max_seq_len:
            raise ValueError(f"{end} positions are asked for; {self.config.name} was trained for at most {self.config.max_seq_len}.")
        x = self.embed(tokens)  # (B, T, C)
        rope = rope_tables(self.config, start, end, x.device, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, rope, cache)
        cache.advance(tokens.shape[1])
        return self.norm(x)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids (B, T) to logits (B, T, V). With a cache, the tokens continue what it holds."""
        return self.head(self.hidden(tokens, cache))
