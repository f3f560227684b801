"""Training: the loss of predicting the next token, and a loop of AdamW steps.

Sources: Loshchilov and Hutter 2019 (AdamW); Ainslie et al. 2023, section 2.1 (uptraining).
Cost: about three forward passes a step, 6 FLOPs a parameter and token (Kaplan et al. 2020).
Not here: learning-rate schedules, mixed precision, checkpoints.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model import Decoder


def next_token_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of each token of `tokens` (B, T) after the first.

    Each is predicted from those before it; T is at least 2.
    """
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def uptrain(model: Decoder, batches: Iterable[Tensor], *, lr: float) -> list[float]:
    """Train `model` in place on batches of token ids (B, T), one AdamW step for each.

    Returns the loss before each step. In Ainslie et al. 2023, section 2.1, training goes on after
    heads are merged, for a share α of the original steps; nothing is special about it, so a small
    model can be trained from scratch with it as well.
    """
    learned = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    try:
        for tokens in batches:
            loss = next_token_loss(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    finally:
        optimizer.zero_grad()  # gradients are as large as the model, and no longer needed
        for parameter, required in learned:
            parameter.requires_grad_(required)
    return losses
