"""What fewer bits cost the default checkpoint: perplexity, and what the benchmark has recorded."""

import json

import pytest
import torch

from minillm import load, model_bytes, quantize
from minillm.evaluate import difference, evaluation_text, perplexity
from minillm.tools.folders import data_folder


@pytest.fixture(scope="module")
def exam(default):
    """The model in float32, text to judge by, its perplexity, and other text to calibrate with."""
    model, tokenizer = default
    ids = tokenizer.encode(evaluation_text("python"))
    known = torch.tensor(ids[-4 * 256 :]).view(4, 256)
    ids = ids[:2048]  # with half as many the ratios move by half a percent from CPU to CPU
    return model, ids, perplexity(model, ids), known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "calibrated", "most", "share"),
    [
        ("int8", False, 0.005, 0.27),
        ("int4", False, 0.10, 0.20),
        ("llm_int8", True, 0.02, 0.27),
        ("smoothquant", True, 0.05, 0.27),
    ],
)
def test_perplexity(exam, scheme, calibrated, most, share):
    model, ids, base, known = exam
    options = {"calibration": known} if calibrated else {}
    small = quantize(model, scheme, **options)
    assert perplexity(small, ids) < (1 + most) * base
    assert model_bytes(small) < share * model_bytes(model)


@pytest.mark.slow
def test_the_files_own_four_bits(exam):
    model, ids, base, _ = exam
    own, _ = load(dtype="int4", device="cpu")
    assert abs(perplexity(own, ids) / base - 1) < 0.01
    assert difference(own, model, ids).kl < 0.01


@pytest.mark.slow
def test_one_scale_for_all_activations_is_ruin(exam):
    model, ids, base, _ = exam
    assert perplexity(quantize(model, "w8a8", per="tensor"), ids) > 1.3 * base


RECORDED = sorted(data_folder().glob("quantize.cpu-*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("text", ["python", "austen"])
def test_what_is_recorded(path, text):
    """Rounding that knows the inputs loses less than rounding that doesn't."""
    quality = json.loads(path.read_text())["quality"]
    base = quality["float32"]["perplexity"][text]
    loss = {name: row["perplexity"][text] / base - 1 for name, row in quality.items()}
    assert loss["int8"] < 0.005 and loss["llm_int8"] < 0.02 and loss["smoothquant"] < 0.05
    assert abs(loss["int4, the file's own"]) < 0.01 and loss["gptq"] < 0.08
    assert max(loss["3 bits, gptq"], loss["3 bits, awq"]) < 0.7 * loss["3 bits"]
    assert loss["2:4, wanda, recovered"] < 0.5 * loss["2:4, wanda"] < 0.5 * loss["2:4, magnitude"]


def test_something_is_recorded():
    assert RECORDED
