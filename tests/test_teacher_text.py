"""Text that the teacher wrote: sampled, kept in a file, made of questions and answers."""

import math

import pytest
from models import lively

from minillm import Sampling, generate
from minillm.distillation.teacher_text import (
    continued_code,
    conversations,
    library_text,
    teacher_text,
)


def test_the_teachers_text(tmp_path):
    teacher, prompts = lively(n_layers=2), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    path = tmp_path / "data" / "text.safetensors"
    texts = teacher_text(teacher, prompts, 10, seed=3, cache=path)
    assert [text[: len(p)] for text, p in zip(texts, prompts, strict=True)] == prompts
    assert [len(text) for text in texts] == [13, 12, 14]
    assert teacher_text(None, prompts, 10, seed=3, cache=path) == texts  # read, not written again
    assert teacher_text(teacher, prompts, 10, seed=3) == texts
    assert teacher_text(teacher, prompts, 10, seed=4) != texts
    stop = texts[0][5]
    cut = teacher_text(teacher, prompts[:1], 10, seed=3, stop_ids=[stop])
    assert cut[0][-1] == stop and stop not in cut[0][3:-1]


def test_text_of_something_else(tmp_path):
    teacher, path = lively(n_layers=2), tmp_path / "text.safetensors"
    teacher_text(teacher, [[1, 2], [3]], 5, cache=path)
    for prompts, options in (([[9], [3]], {}), ([[1, 2]], {}), ([[1, 2], [3]], {"seed": 1})):
        with pytest.raises(ValueError, match="was made from other prompts or with other settings"):
            teacher_text(teacher, prompts, 5, cache=path, **options)
    with pytest.raises(ValueError, match="prompts is empty"):
        teacher_text(teacher, [], 5)
    teacher.norm.fill_(math.nan)
    with pytest.raises(ValueError, match="The teacher failed on 1 prompts: ValueError"):
        teacher_text(teacher, [[1]], 5)


def test_each_request_has_its_own_seed_and_settings():
    teacher, prompts = lively(), [[1, 2, 3], [1, 2, 3]]
    texts = teacher_text(teacher, prompts, 6, temperature=0.7, top_p=0.9, seed=5)
    for i, text in enumerate(texts):
        sampling = Sampling(0.7, None, 0.9, seed=5 + i)
        assert text[3:] == generate(teacher, prompts[i], 6, sampling=sampling)
    assert texts[0] != texts[1]


class Words:
    """Bytes as tokens, cut to the 97 ids of the tests' models; 7 opens a turn and 3 ends it."""

    stop_ids = (3,)

    def encode(self, text):
        return [byte % 90 + 7 for byte in text.encode()]

    def chat(self, messages):
        return [7, 8, *self.encode(messages[0]["content"]), 3, 7, 9]


def test_conversations(tmp_path):
    """A question that ended in time, then an answer; the second time they are read."""
    teacher = lively(n_layers=1)
    options = {"question": 40, "answer": 12, "cache": tmp_path}
    found = conversations(teacher, Words(), 40, **options)
    assert 0 < len(found) < 40
    for prompt, answer in found:
        question = prompt[2:-3]
        assert prompt[:2] == [7, 8] and prompt[-3:] == [3, 7, 9]
        assert len(question) < 40 and 3 not in question
        assert 1 <= len(answer) <= 12 and 3 not in answer[:-1]
        assert len(answer) == 12 or answer[-1] == 3
    assert len({tuple(prompt) for prompt, _ in found}) > 1
    assert conversations(None, Words(), 40, **options) == found
    assert len(list(tmp_path.iterdir())) == 2


def test_code_of_the_standard_library_goes_on(tmp_path):
    teacher, text = lively(n_layers=1), library_text()
    assert "def " in text and len(text) > 1_000_000
    texts = continued_code(teacher, Words(), 3, given=20, n_new=5, cache=tmp_path)
    every = Words().encode(text)
    for ids in texts:
        assert 21 <= len(ids) <= 25
        assert bytes(ids[:20]) in bytes(every)
    assert continued_code(None, Words(), 3, given=20, n_new=5, cache=tmp_path) == texts
