"""Models of the tests: small enough to run in milliseconds."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minillm import Decoder, ModelConfig
from minillm.quantization.calibration import Inputs
from minillm.speculation.medusa import MedusaHeads
from minillm.weights.build import parameter_sources


def tiny_config(**changes: object) -> ModelConfig:
    """H = 4 heads on K = 2, and odd sizes where they are allowed."""
    sizes = {
        "n_layers": 2, "d_model": 24, "n_heads": 4, "n_kv_heads": 2, "d_head": 8, "d_ff": 40,
        "vocab_size": 97, "max_seq_len": 256,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def lively(seed: int = 0, *, size: float = 0.2, **changes: object) -> Decoder:
    """A tiny model with weights so large that its answers wander through the vocabulary.

    size: of the weights; with 0.1 the logits are about 1, and every position and head matters.
    """
    torch.manual_seed(seed)
    model = Decoder(tiny_config(**changes)).eval().requires_grad_(False)
    for p in model.parameters():
        p += size * torch.randn_like(p)
    return model


def save_folder(model: Decoder, folder: Path) -> Path:
    """The model as a folder in Hugging Face format, of the family that its config fits."""
    c = model.config
    raw = {
        "model_type": "qwen3" if c.qk_norm else "llama", "num_hidden_layers": c.n_layers,
        "hidden_size": c.d_model, "num_attention_heads": c.n_heads, "head_dim": c.d_head,
        "num_key_value_heads": c.n_kv_heads, "intermediate_size": c.d_ff,
        "vocab_size": c.vocab_size, "max_position_embeddings": c.max_seq_len,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_embeddings, "attention_bias": c.qkv_bias, "mlp_bias": False,
    }  # fmt: skip
    tensors, parameters = {}, dict(model.named_parameters())
    for ours, parts in parameter_sources(c).items():
        rows = parameters[ours].split([shape[0] for shape in parts.values()])
        tensors |= {name: x.contiguous() for name, x in zip(parts, rows, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def lively_heads(n: int, d_model: int = 24) -> MedusaHeads:
    """Medusa heads that were trained on nothing, and differ from each other."""
    heads = MedusaHeads(n, d_model).requires_grad_(False)
    heads.weight += 0.2 * torch.randn(
        heads.weight.shape, generator=torch.Generator().manual_seed(n)
    )
    return heads


def inputs_of(x: Tensor) -> Inputs:
    """What calibration finds about a matrix that was multiplied with x (n, K)."""
    zeros = torch.zeros(x.shape[1])
    inputs = Inputs(zeros, zeros.clone(), torch.zeros(x.shape[1], x.shape[1]))
    for part in x.split(100):
        inputs.add(part[None])
    return inputs


@torch.inference_mode()
def entering(part: nn.Module, run: Callable[[], object]) -> list[Tensor]:
    """What `part` is given as its first argument while `run` runs."""
    seen: list[Tensor] = []
    hook = part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen
