"""How good a model is, and how far from another one: perplexity, KL divergence, agreement.

Sources: Jelinek et al. 1977 (perplexity); Kullback and Leibler 1951; Dutta et al. 2024 ("Accuracy
is Not All You Need"), who show that two models of equal perplexity may differ in many answers, and
that the KL divergence reveals it.
Cost: a forward pass over the text for each model.
"""

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model import Decoder
from minillm.tools.checks import brief, check_whole
from minillm.tools.folders import PACKAGE_DATA


@dataclass(frozen=True)
class Difference:
    """How far one model's predictions are from another's, over a text.

    kl: mean KL(reference ‖ model) of the next token's distribution, in nats. agreement: the share
    of positions where both have the same most likely token.
    """

    kl: float
    agreement: float


def evaluation_text(name: str) -> str:
    """A text that needs no download.

    "python": Python's own help on the language (`pydoc`). "austen": the beginning of Jane Austen's
    "Persuasion" (1818; from the CRAN package janeaustenr 1.0.0).
    """
    if name == "python":
        topics = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[key] for key in sorted(topics))
    if name == "austen":
        return (PACKAGE_DATA / "austen.txt").read_text(encoding="utf-8")
    raise ValueError(f"name is {brief(name)}; choose python or austen.")


def perplexity(model: Decoder, ids: Sequence[int], window: int = 512) -> float:
    """exp of the mean cross entropy of each token, given those before it in its window.

    ids: at least two. The text is cut into windows of `window` tokens; the last may be shorter.
    """
    total, n = 0.0, 0
    for tokens in _windows(model, ids, window):
        logits = _logits(model, tokens)[:-1]  # (T - 1, V): the last one predicts the next window
        total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        n += len(logits)
    return math.exp(total / n)


def difference(
    model: Decoder, reference: Decoder, ids: Sequence[int], window: int = 512, first: int = 0
) -> Difference:
    """How far `model` is from `reference` on a text, cut as in `perplexity`.

    first: the position of the first token whose prediction counts; those before it are only
    context, such as the question before an answer.
    """
    check_whole("first", first, least=0)
    if first > len(ids) - 1:
        raise ValueError(f"first is {first}, but ids holds {len(ids)} tokens; give a smaller one.")
    kl, same, n = 0.0, 0, 0
    for i, tokens in enumerate(_windows(model, ids, window)):
        # The prediction of token `first` is made one token before it.
        counted = slice(max(0, first - 1 - i * window), None)
        mine = _logits(model, tokens)[counted].log_softmax(-1)  # (T counted, V)
        theirs = _logits(reference, tokens.to(reference.device))[counted]
        theirs = theirs.log_softmax(-1).to(mine.device)
        kl += float(F.kl_div(mine, theirs, log_target=True, reduction="sum"))
        same += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        n += len(mine)
    return Difference(kl / n, same / n)


def _windows(model: Decoder, ids: Sequence[int], window: int) -> Iterator[Tensor]:
    """The windows: token ids (1, T), T at least 2."""
    check_whole("window", window, least=2)
    if len(ids) < 2:
        raise ValueError(f"ids holds {len(ids)} tokens; give at least two, to predict one of them.")
    for start in range(0, len(ids), window):
        if len(piece := ids[start : start + window]) > 1:
            yield torch.tensor([list(piece)], device=model.device)


@torch.inference_mode()
def _logits(model: Decoder, tokens: Tensor) -> Tensor:
    """Logits (T, V) of tokens (1, T), in float32."""
    return model(tokens)[0].float()
