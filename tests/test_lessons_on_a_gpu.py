"""What the lessons do with the sizes that they have for a GPU, on paper and without numbers.

No GPU is needed: memory is counted by `minillm.costs`, and passes of those sizes run on PyTorch's
device "meta", whose tensors have shapes and no numbers.
"""

import ast
import json
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import pytest
import torch

from minillm import Decoder, KVCache, ModelConfig, PagedKVCache, costs
from minillm.bench import gpu_lessons
from minillm.bench.gpu_second import AT_ONCE
from minillm.evaluate import evaluation_text
from minillm.serving.workload import azure_load

LESSONS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SMOLLM2 = ModelConfig.preset("smollm2-135m")
V = SMOLLM2.vocab_size
MEASURING = 2**30
"""Numbers in the matrix that `read_bandwidth` reads on a GPU."""


def cells(lesson: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(lesson.read_text())["cells"]]


def gpu_sizes(lesson: Path) -> dict:
    """The lesson's own table for a GPU; 00 chooses between two, 13 and 15 have none."""
    for source in cells(lesson):
        if "SIZES = {" not in source and "size = dict(" not in source:
            continue
        for node in ast.parse(source).body:
            target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            if target == "SIZES":
                return eval(ast.unparse(node.value), {"torch": torch})["cuda"]
            if target == "size" and isinstance(node.value, ast.IfExp):
                return eval(ast.unparse(node.value.orelse))
    return {}


SIZES = {lesson.stem[:2]: gpu_sizes(lesson) for lesson in LESSONS}


def test_the_lessons_have_sizes_for_a_gpu():
    assert [number for number, size in SIZES.items() if not size] == ["13", "15"]  # CPUs alone
    assert SIZES["02"] == {"prompt": 4096, "batch": 256, "repeats": 10}


# On paper


def mqa_configs() -> list[ModelConfig]:
    """Lesson 04's models: 16 query heads and fewer and fewer key/value heads."""
    return [ModelConfig(4, 512, 16, K, 64, 1024, 1000, 16384) for K in (16, 8, 4, 2, 1)]


def paper(lesson: str) -> float:
    """Bytes that a lesson has on a GPU at once, rounded up: weights, caches, logits, scores."""
    size, weights = SIZES[lesson], costs.weight_bytes(SMOLLM2, "float32")
    measuring = 4 * MEASURING
    calibration = math.prod(size.get("calibration", ()))

    def cached(batch: int, tokens: int, dtype: str = "float32") -> int:
        return costs.kv_cache_bytes(SMOLLM2, batch, tokens, dtype)

    def passing(tokens: int, logits: int = 0) -> int:
        """A pass's largest tensors in float32, and copies of some logits for a softmax."""
        return 4 * (tokens * (8 * SMOLLM2.d_model + 4 * SMOLLM2.d_ff) + 6 * logits * V)

    match lesson:
        case "00":  # all forms of the model are kept
            return 3 * weights + measuring + cached(8, 512)
        case "01":
            return weights + measuring + passing(size["n_tokens"], size["n_tokens"])
        case "02":
            caches = cached(size["batch"], 65, "bfloat16") + cached(16, 1025, "bfloat16")
            return weights + measuring + caches + passing(size["prompt"], size["batch"])
        case "03":
            lengths = size["lengths"]
            return weights + measuring + cached(1, sum(lengths)) + passing(lengths[-1])
        case "04":  # the caches of all models, and one layer of one copied to all heads, twice
            B, S, dtype = size["batch"], size["context"], size["dtype"]
            caches = sum(costs.kv_cache_bytes(c, B, S, dtype) for c in mqa_configs())
            copied = costs.kv_cache_bytes(mqa_configs()[0], B, S, dtype) // 4
            return measuring + caches + 2 * copied
        case "05":  # scores and weights that are held, those of one run, and one more for softmax
            scores = SMOLLM2.n_heads * size["lengths"][-1] ** 2 * size["dtype"].itemsize
            return 5 * scores + passing(size["lengths"][-1])
        case "06":  # one contiguous cache and five paged ones; then one for the prefix
            caches = 6 * cached(size["batch"], size["context"])
            return weights + measuring + caches + cached(1, 2 * size["prefix"])
        case "07":
            return weights + measuring + cached(1, size["long"] + 640) + passing(size["long"])
        case "08":
            return weights + measuring + cached(1, 16 * size["blocks"]) + passing(size["budget"])
        case "09" | "10":  # four forms; logits of two models; the squares of every layer's inputs
            squares = 4 * SMOLLM2.n_layers * (3 * SMOLLM2.d_model**2 + SMOLLM2.d_ff**2)
            text = passing(max(size["evaluated"], calibration), 2 * size["evaluated"])
            return 5 * weights + measuring + text + 2 * squares
        case "11":  # weights, gradients and two averages; what the backward pass reads
            tokens = 128 * size["rows"]
            return 6 * weights + SMOLLM2.n_layers * passing(tokens) + passing(tokens, 2 * tokens)
        case "12":
            return 3 * weights + 3 * cached(1, 1024)
        case "14":  # three forms; the pools of two engines; the reader's engine
            pool = cached(64 * size["chats"], 16)
            return 3 * weights + measuring + 2 * pool + passing(512, size["chats"])
    return 0


def test_lessons_fit_a_gpu_of_80_gb():
    """Alone, and the largest few side by side, as `bench gpu --second` runs them."""
    taken = {lesson: paper(lesson) for lesson in SIZES}
    assert [lesson for lesson, size in taken.items() if not size] == ["13", "15"]
    assert sum(sorted(taken.values())[-AT_ONCE:]) < 80e9, taken


def test_the_paper_counts_what_is_made():
    """The largest caches of lessons 02, 04, 06 and 08, made without memory."""
    with torch.device("meta"):
        model = Decoder(SMOLLM2).bfloat16()
        size = SIZES["02"]
        cache = KVCache(model, size["batch"], 65)
        assert cache.nbytes == costs.kv_cache_bytes(SMOLLM2, size["batch"], 65, "bfloat16")
        size = SIZES["04"]
        for config in mqa_configs():
            cache = KVCache(Decoder(config).bfloat16(), size["batch"], size["context"])
            arguments = (size["batch"], size["context"], size["dtype"])
            assert cache.nbytes == costs.kv_cache_bytes(config, *arguments)
        model, size = model.float(), SIZES["06"]
        n = size["batch"] * size["context"]
        pages = PagedKVCache(model, n // 16, 16)
        assert pages.nbytes == costs.kv_cache_bytes(SMOLLM2, 1, n, "float32")
        n = SIZES["08"]["blocks"]
        assert PagedKVCache(model, n, 16).nbytes == costs.kv_cache_bytes(SMOLLM2, 1, 16 * n, "fp32")


# Passes without numbers


def passes() -> list[tuple[str, int, int, int]]:
    """(lesson, batch, new tokens, cached tokens) of the largest passes."""
    s = SIZES
    return [
        ("01", 1, s["01"]["n_tokens"], 0),
        ("02", 1, s["02"]["prompt"], 0),
        ("02", s["02"]["batch"], 1, 64),
        ("02", 16, 1, 1024),
        *(("03", 1, n, 0) for n in s["03"]["lengths"]),
        *(("03", 1, 1, n - 1) for n in s["03"]["lengths"]),
        ("06", s["06"]["batch"], 1, s["06"]["context"] - 1),
        ("07", 1, s["07"]["long"], 0),
        ("08", 1, s["08"]["budget"], 0),
        ("09", *s["09"]["calibration"], 0),
        ("09", 1, s["09"]["evaluated"], 0),
        ("10", *s["10"]["calibration"], 0),
        ("11", s["11"]["rows"], 128, 0),
    ]


@pytest.mark.parametrize(("lesson", "batch", "new", "cached"), passes())
def test_passes_of_these_sizes(lesson, batch, new, cached):
    """Lengths that the model has positions for, and shapes that fit; two layers say it all."""
    with torch.device("meta"), torch.inference_mode():
        model = Decoder(replace(SMOLLM2, n_layers=2))
        cache = KVCache(model, batch, cached + new)
        cache.advance(cached)
        states = model.hidden(torch.zeros(batch, new, dtype=torch.long), cache)
    assert states.shape == (batch, new, SMOLLM2.d_model) and cache.length == cached + new


def test_requests_of_lesson_08_fit_its_engine():
    size = SIZES["08"]
    requests = azure_load(math.inf, size["requests"], V, scale=size["scale"], seed=1)
    tokens = [len(r.prompt_ids) + r.max_new_tokens for r in requests]
    assert max(tokens) <= min(SMOLLM2.max_seq_len, 16 * size["blocks"])


def test_texts_are_long_enough(default):
    """In the default tokenizer; a slice of a text that is too short would just be shorter."""
    _, tokenizer = default
    count = lambda text: len(tokenizer.encode(text))  # noqa: E731
    manual = ("if", "while", "for", "try", "with", "function", "class", "naming")
    assert (
        count("\n".join(textwrap.dedent(topics[name]) for name in manual)) > SIZES["06"]["prefix"]
    )
    long = topics["objects"] + topics["naming"] + topics["assignment"]
    assert 2 * count(long) > SIZES["07"]["long"] < SMOLLM2.max_seq_len - 4
    assert min(count(topics[name]) for name in ("objects", "naming")) > SIZES["08"]["prompt"]
    for lesson in ("09", "10"):  # what is evaluated is at the beginning, the calibration at the end
        size = SIZES[lesson]
        both = size["evaluated"] + math.prod(size["calibration"])
        assert count(evaluation_text("python")[: 40 * both]) > both


# How they run there


def a_lesson(folder: Path, *sources: str) -> Path:
    path = folder / "99_a_lesson.ipynb"
    texts = [{"cell_type": "markdown", "source": ["*text*"]}]
    code = [{"cell_type": "code", "source": s.splitlines(keepends=True)} for s in sources]
    path.write_text(json.dumps({"cells": texts + code}))
    return path


def test_a_lesson_runs_as_a_script(tmp_path, monkeypatch, capsys):
    """Where nbclient is missing: functions have their source, tables are printed."""
    monkeypatch.setattr(gpu_lessons.importlib.util, "find_spec", lambda name: None)
    for name in ("IPython", "IPython.display"):  # put back what was there, loaded or not
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    first = (
        "import inspect\nfrom IPython.display import Markdown, display\n\ndef f():\n    return 5;"
    )
    then = "display(Markdown('| a table |'))\nprint(inspect.getsource(f), f())"
    lesson = a_lesson(tmp_path, first, then)
    assert gpu_lessons.main([str(lesson), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "| a table |" in out and "return 5; 5" in out.replace("\n", "")
    assert "ran as a script" in out
    lesson = a_lesson(tmp_path, "x = 1", "1 / (x - 1)")
    assert gpu_lessons.main([str(lesson), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "99_a_lesson.py" in said and "1 / (x - 1)" in said and "ZeroDivisionError" in said


@pytest.mark.slow
def test_a_lesson_runs_in_a_kernel(tmp_path, capsys):
    """The executed copy is kept, also of a lesson that fails."""
    pytest.importorskip("nbclient", reason="needs the package nbclient")
    cell = {"metadata": {}, "outputs": [], "execution_count": None}
    lesson = a_lesson(tmp_path, "print(6 * 7)", "1 / 0")
    document = json.loads(lesson.read_text())
    document["cells"] = [c | cell for c in document["cells"][1:]]
    lesson.write_text(json.dumps(document | {"metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    assert gpu_lessons.main([str(lesson), str(tmp_path / "out")]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    ran = json.loads((tmp_path / "out" / lesson.name).read_text())
    assert ran["cells"][0]["outputs"][0]["text"] == ["42\n"]
