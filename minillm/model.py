"""The decoder: RMSNorm, rotary positions, attention, SwiGLU. Every technique plugs into this model.

Sources: Touvron et al. 2023 (Llama), section 2.2; Zhang and Sennrich 2019 (RMSNorm); Su et al. 2021
(RoPE); Shazeer 2020 (SwiGLU); Yang et al. 2025 (Qwen3: RMSNorm on q and k).
Cost: 2 FLOPs per matrix parameter and token, see `minillm.costs`.

Everything here is per token, except for one call that looks at other tokens,
`cache.attend(layer, q, k, v)`. So a technique replaces the cache, or swaps a Linear for another
module, and never edits this file.
The matrices for q, k and v are one Linear, as are gate and up: one large product keeps the memory
bus busier than three small ones.
Not here: how the layers run in fewer operations (`minillm.layers.fast`).
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minillm.cache import Cache, NoCache
from minillm.config import ModelConfig
from minillm.layers import fast
from minillm.layers.per_token import apply_rope, rms_norm, rope_tables, swiglu

MATRICES = ("qkv", "out", "gate_up", "down", "head")
"""The names of the matrices that tokens are multiplied with: four in each layer, and the head."""


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


class Layer(nn.Module):
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = self.config = config
        heads = c.n_heads * c.d_head
        # Attention.
        self.attn_norm = nn.Parameter(torch.ones(c.d_model))
        self.qkv = Linear(c.d_model, heads + 2 * c.n_kv_heads * c.d_head, bias=c.qkv_bias)
        self.q_norm = nn.Parameter(torch.ones(c.d_head)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.d_head)) if c.qk_norm else None
        self.out = Linear(heads, c.d_model, bias=c.attn_out_bias)
        # Feed-forward network.
        self.mlp_norm = nn.Parameter(torch.ones(c.d_model))
        self.gate_up = Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.down = Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor, layer: int, rope: tuple[Tensor, Tensor], cache: Cache) -> Tensor:
        """Layer number `layer`: the residual stream x (B, T, C) with both blocks' outputs added.

        rope: cos and sin of the tokens' positions, (T, 1, D) each.
        """
        H, K, D = self.config.n_heads, self.config.n_kv_heads, self.config.d_head
        eps = self.config.norm_eps

        qkv = self.qkv(rms_norm(x, self.attn_norm, eps))  # (B, T, (H + 2K) D)
        heads = qkv.view(len(x), -1, H + 2 * K, D)  # (B, T, H + 2K, D)
        q, k, v = heads.split_with_sizes((H, K, K), -2)  # (B, T, H, D), then (B, T, K, D) twice
        if self.q_norm is not None:  # Qwen3
            q, k = rms_norm(q, self.q_norm, eps), rms_norm(k, self.k_norm, eps)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        attended = cache.attend(layer, q, k, v)  # (B, T, H, D)
        x = x + self.out(attended.flatten(-2))  # (B, T, C)

        gate_up = self.gate_up(rms_norm(x, self.mlp_norm, eps))  # (B, T, 2F)
        return x + self.down(swiglu(gate_up))  # (B, T, C)


class Layers(nn.ModuleList):
    """All layers, one after another."""

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Cache,
        faster: bool | None = None,
    ) -> Tensor:
        """The residual stream x (B, T, C) through the layers. faster: `Decoder.fast`."""
        if operations := fast.operations(x, faster):
            return fast.run(self, x, rope, cache, operations)
        for i, layer in enumerate(self):
            x = layer(x, i, rope, cache)
        return x


class Decoder(nn.Module):
    """A decoder-only language model with random weights; `minillm.load` fills in a checkpoint's.

    fast: whether the layers run in the fewer operations of `minillm.layers.fast`: None where that
    pays and no gradients are recorded, False never, True always, in the kernels for a GPU, with a
    ValueError where it is impossible.
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
        self.fast: bool | None = None
        self._rope_tables: tuple[Tensor, Tensor] | None = None
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.layers = Layers(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.Parameter(torch.ones(config.d_model))
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of all weights that are not quantized."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(L, K, D) of the keys, and of the values, that a cache stores for each token.

        Read from the layers: a model that holds only some layers or heads needs a cache for only
        those.
        """
        c = self.layers[0].config
        return len(self.layers), c.n_kv_heads, c.d_head

    @property
    def kv_format(self) -> str:
        """`kv_shape` and dtype in words: two models with the same can use the same cache."""
        L, K, D = self.kv_shape
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{L} layers of {K} key/value heads of {D} dimensions in {dtype}"

    def _check_ids(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; expected "
                "integer ids (B, T)."
            )
        if tokens.shape[1] == 0:
            raise ValueError("tokens is empty; give at least one token.")
        # Only on a CPU: elsewhere reading the numbers would have to wait for the device.
        if tokens.device.type == "cpu" and len(tokens):
            low, high = (int(x) for x in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens holds the id {low if low < 0 else high}; ids must be from 0 to "
                    f"{self.config.vocab_size - 1}."
                )

    def _checked_positions(self, tokens: Tensor, cache: Cache) -> range | Tensor:
        if cache.made_for not in (None, self.kv_format):
            raise ValueError(
                f"The cache was made for {cache.made_for}; {self.config.name} has {self.kv_format}."
            )
        positions = cache.positions(tokens.shape[1])
        longest = self.config.max_seq_len
        # Caches that give a tensor check it themselves.
        if isinstance(positions, range) and positions.stop > longest:
            raise ValueError(
                f"{positions.stop} positions are asked for; {self.config.name} was trained for at "
                f"most {longest}."
            )
        return positions

    def _rope(self, positions: range | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (T, 1, D) of these positions, looked up in tables that are computed once.

        A captured CUDA graph can look numbers up, but cannot copy any from the host.
        """
        tables = self._rope_tables
        if tables is None or (tables[0].device, tables[0].dtype) != (self.device, self.dtype):
            every = range(self.config.max_seq_len)
            with torch.inference_mode(False):  # so that training can use the same tables later
                tables = rope_tables(self.config, every, self.device, self.dtype)
            self._rope_tables = tables
        at = slice(positions.start, positions.stop) if isinstance(positions, range) else positions
        return tables[0][at], tables[1][at]

    def embedded(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What enters the first layer: x (B, T, C), and cos and sin (T, 1, D) of the positions.

        Raises what `hidden` does.
        """
        self._check_ids(tokens)
        positions = self._checked_positions(tokens, cache)
        return self.embed(tokens), self._rope(positions)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids (B, T) to the last layer's normalized states (B, T, C).

        `head` turns those into logits. Raises ValueError for tokens of another shape or dtype, for
        a cache made for another model, for positions past the model's `max_seq_len`, and on a CPU
        for ids outside the vocabulary.
        """
        cache = NoCache() if cache is None else cache
        x, rope = self.embedded(tokens, cache)  # (B, T, C)
        x = self.layers(x, rope, cache, self.fast)  # (B, T, C)
        cache.advance(tokens.shape[1])
        return rms_norm(x, self.norm, self.config.norm_eps)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Token ids (B, T) to logits (B, T, V). With a cache, the tokens continue what it holds."""
        return self.head(self.hidden(tokens, cache))


def replace_linears(model: Decoder, replacement: Callable[[str, Linear], nn.Module]) -> Decoder:
    """A model that shares `model`'s weights, with `replacement(name, linear)` for each matrix.

    `replacement` may return `linear` itself to keep it. Modules that are not plain `Linear` stay as
    they are.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    replaced = copy.deepcopy(model, shared)  # new modules around the same parameters
    for name, module in list(replaced.named_modules()):
        if type(module) is Linear:
            parent, _, child = name.rpartition(".")
            setattr(replaced.get_submodule(parent), child, replacement(name, module))
    return replaced


def check_plain(model: Decoder, what: str) -> None:
    """ValueError unless every matrix is a plain Linear and holds finite numbers.

    what: the verb for the message: "quantize".
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in MATRICES:
            continue
        if type(module) is not Linear:
            raise ValueError(
                f"{name} is not a plain Linear but a {type(module).__name__} already; {what} the "
                "model that this one was made from."
            )
        if not bool(module.weight.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite; load the model again.")
