"""The decoder: RMSNorm, rotary positions, attention, SwiGLU. Every technique plugs into this model.

Sources: Touvron et al. 2023 (Llama), section 2.2; Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021
(RoPE); Shazeer 2020 (SwiGLU); Yang et al. 2025 (Qwen3: RMSNorm on q and k).
Cost: 2 FLOPs per matrix parameter and token, see `minillm.costs`.

Everything here is per token, except for one call that looks at other tokens,
`cache.attend(layer, q, k, v)`. So a technique replaces the cache, or swaps a Linear for another
module, and never edits this file.
Activations are (B, T, C). The matrices for q, k and v are one Linear, as are gate and up: one large
product keeps the memory bus busier than three small ones. A layer is one module, and its norms are
plain parameters: on a CPU each module call costs about 10 µs between two matrix products, because
the weights have just passed through the caches and emptied them of everything else.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cache import Cache, NoCache
from minillm.config import ModelConfig


def _small_random(weight: Tensor) -> None:
    """Normal with standard deviation 0.02, as in GPT-2."""
    if not weight.is_meta:  # on the meta device only shapes are wanted
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rope_tables(
    config: ModelConfig, positions: range | Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, D), for T positions given as a range or a tensor (T,).

    They are the same for every head. Pair i of D/2 turns by position * theta^(-2i/D) (Su et al.
    2021, equation 15); its angle is at i and again at i + D/2. The sine carries the sign of the
    rotation: minus for the first half of D, plus for the second.
    """
    pairs = torch.arange(0, config.d_head, 2, device=device, dtype=torch.float32) / config.d_head
    frequencies = 1.0 / config.rope_theta**pairs  # (D/2,)
    if config.rope_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_factors, device=device)
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, device=device)
    angles = positions.float()[:, None, None] * frequencies  # (T, 1, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x (B, T, heads, D) by its angle."""
    # The rotation needs the other half of each pair: rolling by D/2 swaps the halves.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Layer(nn.Module):
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = self.config = config
        heads = c.n_heads * c.d_head
        self.attn_norm = nn.Parameter(torch.ones(c.d_model))
        self.qkv = Linear(c.d_model, heads + 2 * c.n_kv_heads * c.d_head, bias=c.qkv_bias)
        self.q_norm = nn.Parameter(torch.ones(c.d_head)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.d_head)) if c.qk_norm else None
        self.out = Linear(heads, c.d_model, bias=c.attn_out_bias)
        self.mlp_norm = nn.Parameter(torch.ones(c.d_model))
        self.gate_up = Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, layer: int, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        """The residual stream x (B, T, C) after layer number `layer`."""
        H, K, D = self.config.n_heads, self.config.n_kv_heads, self.config.d_head
        eps = self.config.norm_eps

        qkv = self.qkv(rms_norm(x, self.attn_norm, eps))
        qkv = qkv.unflatten(-1, (H + 2 * K, D))  # (B, T, H + 2K, D)
        qk, v = qkv.split((H + K, K), dim=-2)
        if self.q_norm is not None:
            q, k = qk.split((H, K), dim=-2)
            qk = torch.cat((rms_norm(q, self.q_norm, eps), rms_norm(k, self.k_norm, eps)), dim=-2)
        q, k = apply_rope(qk, *rope).split((H, K), dim=-2)  # q and k turn together, in one call
        x = x + self.out(cache.attend(layer, q, k, v).flatten(-2))

        gate, up = self.gate_up(rms_norm(x, self.mlp_norm, eps)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.down(F.silu(gate) * up)  # SwiGLU


class Decoder(nn.Module):
    """A decoder-only language model with random weights; `minillm.load` fills in a checkpoint's.

    Raises ValueError for a config that can only be counted.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not config.runnable:
            raise ValueError(
                f"{config.name} ({config.norm}, {config.mlp}, {config.positions} positions) can be "
                "counted but not run; Decoder implements RMSNorm, SwiGLU and rotary positions."
            )
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.Parameter(torch.ones(config.d_model))
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(L, K, D) of what a cache stores for each token of this model.

        Read from the layers: a model that holds only some of them, or of their heads, needs a cache
        for only those.
        """
        c = self.layers[0].config
        return len(self.layers), c.n_kv_heads, c.d_head

    @property
    def kv_format(self) -> str:
        """`kv_shape` and dtype in words: a cache for one model fits another with the same."""
        L, K, D = self.kv_shape
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{L} layers of {K} key/value heads of {D} dimensions in {dtype}"

    def _check_ids(self, tokens: Tensor) -> None:
        # Only on a CPU: elsewhere a look at the numbers would have to wait for the device.
        if tokens.device.type == "cpu" and len(tokens):
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens holds the id {low if low < 0 else high}; ids must be from 0 to "
                    f"{self.config.vocab_size - 1}."
                )

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids (B, T) to the last layer's normalized states (B, T, C).

        `head` turns those into logits. Raises ValueError for tokens of another shape or dtype, for
        a cache made for another model, for positions past the model's `max_seq_len`, and on a CPU
        for ids outside the vocabulary.
        """
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; expected "
                "integer ids (B, T)."
            )
        if tokens.shape[1] == 0:
            raise ValueError("tokens is empty; give at least one token.")
        self._check_ids(tokens)
        cache = NoCache() if cache is None else cache
        made_for = getattr(cache, "made_for", None)  # caches that keep nothing fit any model
        if made_for not in (None, self.kv_format):
            raise ValueError(
                f"The cache was made for {made_for}; {self.config.name} has {self.kv_format}."
            )
        positions = cache.positions(tokens.shape[1])
        longest = self.config.max_seq_len
        # Caches that give a tensor check it themselves.
        if isinstance(positions, range) and positions.stop > longest:
            raise ValueError(
                f"{positions.stop} positions are asked for; {self.config.name} was trained for at "
                f"most {longest}."
            )
        x = self.embed(tokens)  # (B, T, C)
        rope = rope_tables(self.config, positions, x.device, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, rope, cache)
        cache.advance(tokens.shape[1])
        return rms_norm(x, self.norm, self.config.norm_eps)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids (B, T) to logits (B, T, V). With a cache, the tokens continue what it holds."""
        return self.head(self.hidden(tokens, cache))


def replace_linears(model: Decoder, replacement: Callable[[str, Linear], nn.Module]) -> Decoder:
    """A model that shares `model`'s weights, with `replacement(name, linear)` for each matrix.

    The matrices are the layers' qkv, out, gate_up and down, and the head. `replacement` may return
    `linear` itself to leave it. Modules that are not plain `Linear` stay as they are.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    replaced = copy.deepcopy(model, shared)  # new modules around the same parameters
    for name, module in list(replaced.named_modules()):
        if type(module) is Linear:
            parent, _, child = name.rpartition(".")
            setattr(replaced.get_submodule(parent), child, replacement(name, module))
    return replaced
