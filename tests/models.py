"""Models of the tests: small enough to run in milliseconds."""

import torch

from minillm import Decoder, ModelConfig


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
