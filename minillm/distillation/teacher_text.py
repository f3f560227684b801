"""Text written by the teacher: what a student that drafts for it has to predict.

Sources: Kim and Rush 2016, section 3.2 (sequence-level distillation); Xu et al. 2024 (Magpie): a
chat model that is given only the beginning of a user's turn writes the question, too.
Cost: a decode step of the teacher for each token, shared by the batched engine among 64 requests.
"""

import random
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from tqdm import tqdm

from minillm.model import Decoder
from minillm.sampling import Sampling
from minillm.serving.engine import Engine
from minillm.serving.engine_config import EngineConfig
from minillm.tokenizer import Tokenizer
from minillm.tools.checks import check_whole
from minillm.training import save_whole

AT_ONCE = 64
"""Requests per batch."""


class Conversation(NamedTuple):
    """Token ids: all before the answer, then the answer, with its stop token unless cut off."""

    prompt: list[int]
    answer: list[int]


def teacher_text(
    teacher: Decoder,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    cache: Path | None = None,
) -> list[list[int]]:
    """Each prompt with the teacher's own continuation, of at most n_new tokens.

    Sampled by the batched engine, request i with seed + i. cache: a .safetensors file, read if it
    exists and written otherwise. ValueError for no prompts, for a cache made from other prompts or
    with other settings, and for a teacher that fails.
    """
    if not prompts:
        raise ValueError("prompts is empty; give at least one.")
    stops = list(stop_ids)
    # As text, since a .safetensors file's metadata holds nothing else.
    asked = {"n_new": n_new, "temperature": temperature, "top_p": top_p, "stop": stops}
    settings = {name: str(value) for name, value in (asked | {"seed": seed}).items()}
    if cache is not None and cache.exists():
        return _cached(cache, prompts, settings)
    # Blocks for as many of the longest requests as run at once: nobody is preempted.
    longest = max(map(len, prompts)) + n_new
    at_once = min(AT_ONCE, len(prompts))
    config = EngineConfig(n_blocks=at_once * -(-longest // 16) + 1, max_seqs=at_once)
    engine = Engine(teacher, config)
    numbers = [
        engine.submit(p, n_new, sampling=Sampling(temperature, None, top_p, seed + i),
                      stop_ids=stops)
        for i, p in enumerate(prompts)
    ]  # fmt: skip
    done = engine.run()
    if errors := [done[n].error for n in numbers if done[n].error]:
        raise ValueError(f"The teacher failed on {len(errors)} prompts: {errors[0]}")
    texts = [[*p, *done[n].tokens] for p, n in zip(prompts, numbers, strict=True)]
    if cache is not None:
        ids = torch.tensor([i for text in texts for i in text], dtype=torch.int32)
        lengths = torch.tensor([len(text) for text in texts])
        save_whole({"ids": ids, "lengths": lengths}, cache, settings)
    return texts


def _cached(
    path: Path, prompts: Sequence[Sequence[int]], settings: dict[str, str]
) -> list[list[int]]:
    """The texts of a cache file; ValueError if it was made for something else."""
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in ("ids", "lengths")}
        same_settings = file.metadata() == settings
    texts = [row.tolist() for row in stored["ids"].split(stored["lengths"].tolist())]
    same_prompts = len(texts) == len(prompts) and all(
        text[: len(p)] == list(p) for text, p in zip(texts, prompts, strict=True)
    )
    if not (same_settings and same_prompts):
        raise ValueError(f"{path} was made from other prompts or with other settings; delete it.")
    return texts


def conversations(
    teacher: Decoder,
    tokenizer: Tokenizer,
    n: int,
    *,
    question: int = 64,
    answer: int = 200,
    seed: int = 0,
    cache: Path | None = None,
) -> list[Conversation]:
    """At most n conversations of one question and one answer, both written by the teacher.

    question, answer: the most tokens of each. A question that has not ended by then is dropped.
    cache: a folder that keeps each batch, so that an interrupted call can resume.
    """
    check_whole("n", n)
    # The chat template around a question: ids before it, and ids from its stop token on.
    marker = tokenizer.encode("?")
    chat = tokenizer.chat([{"role": "user", "content": "?"}])
    at = chat.index(marker[0])
    before, after, stop = chat[:at], chat[at + 1 :], tokenizer.stop_ids
    found: list[Conversation] = []
    for start in tqdm(range(0, n, AT_ONCE * 4), desc="conversations", disable=cache is None):
        count = min(AT_ONCE * 4, n - start)
        files = [cache and cache / f"{kind}-{start}.safetensors" for kind in ("asked", "answered")]
        asked = teacher_text(
            teacher, [before] * count, question, top_p=0.95, stop_ids=stop, seed=seed + start,
            cache=files[0],
        )  # fmt: skip
        # Without its own stop token, since `after` begins with it.
        whole = [text[:-1] + after for text in asked if text[-1] in stop]
        if whole:
            texts = teacher_text(
                teacher, whole, answer, temperature=0.7, stop_ids=stop, seed=seed + start,
                cache=files[1],
            )  # fmt: skip
            pairs = zip(whole, texts, strict=True)
            found += [Conversation(prompt, text[len(prompt) :]) for prompt, text in pairs]
    return found


def library_text() -> str:
    """The source of Python's standard library: code and prose found on every machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))
    )


def continued_code(
    teacher: Decoder,
    tokenizer: Tokenizer,
    n: int,
    *,
    given: int = 48,
    n_new: int = 128,
    seed: int = 0,
    cache: Path | None = None,
) -> list[list[int]]:
    """n pieces of the standard library, of `given` tokens each, continued by the teacher."""
    lines, stream = library_text().splitlines(keepends=True), random.Random(seed)
    starts = [stream.randrange(len(lines) - given) for _ in range(n)]
    prompts = [tokenizer.encode("".join(lines[i : i + given]))[:given] for i in starts]
    return teacher_text(
        teacher, prompts, n_new, temperature=0.7, stop_ids=tokenizer.stop_ids, seed=seed,
        cache=cache and cache / "code.safetensors",
    )  # fmt: skip
