"""The models of the benchmarks: the default checkpoint on a CPU, random weights on a GPU.

Speed does not depend on the weights' values, and a machine with a GPU may have no network.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minillm.config import ModelConfig
from minillm.model import Decoder


def random_model(preset: str, device: torch.device) -> Decoder:
    """A model of a published one's shapes, with random weights in bfloat16."""
    with born_in(device, torch.bfloat16):
        return Decoder(ModelConfig.preset(preset)).eval().requires_grad_(False)


@contextmanager
def born_in(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, modules are made on `device` and in `dtype`, never larger elsewhere."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def default_model(device: torch.device, prompts: list[str]) -> tuple[Decoder, list[list[int]]]:
    """The model to measure, and the prompts as token ids.

    On a GPU, where the weights are random, the ids are the prompts' bytes.
    """
    if device.type == "cuda":
        return random_model("smollm2-135m", device), [list(text.encode()) for text in prompts]
    # Imported here, so that a machine with a GPU needs none of its dependencies.
    from minillm.weights.loading import load

    model, tokenizer = load(device=device)
    return model, [tokenizer.encode(text) for text in prompts]
