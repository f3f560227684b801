"""What the tests share: one loaded default model, and tiny random models of every family."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a hub

import pytest
import torch

import minillm
from minillm import Decoder, ModelConfig, Tokenizer

torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def default() -> tuple[Decoder, Tokenizer]:
    """The default checkpoint in float32 on the CPU, fetched if it is not in the cache."""
    return minillm.load(device="cpu", dtype="float32")


def tiny_config(**changes: object) -> ModelConfig:
    """A decoder small enough to run in milliseconds; H = 4 heads on K = 2, and odd sizes where they are allowed."""
    sizes = dict(n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_head=8, d_ff=40, vocab_size=97, max_seq_len=256)
    return ModelConfig(**(sizes | changes))


@pytest.fixture
def tiny() -> Decoder:
    torch.manual_seed(0)
    return Decoder(tiny_config()).eval()
