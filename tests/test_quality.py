"""What fewer bits cost the default checkpoint: perplexity, and what the benchmark has recorded."""

import json

import pytest
import torch

from minillm import load, model_bytes, prepack, quantize
from minillm.evaluate import difference, evaluation_text, perplexity
from minillm.tools.folders import data_folder


@pytest.fixture(scope="module")
def exam(default):
    """The model in float32, text to judge by, its perplexity, and other text to calibrate with."""
    model, tokenizer = default
    ids = tokenizer.encode(evaluation_text("python"))
    known = torch.tensor(ids[-4 * 256 :]).view(4, 256)
    ids = ids[:1024]  # the ratios move by half a percent from CPU to CPU
    return model, ids, perplexity(prepack(model), ids), known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "calibrated", "most", "share"),
    [
        ("int8", False, 0.01, 0.27),
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
    assert difference(own, prepack(model), ids[:512]).kl < 0.01


@pytest.mark.slow
def test_one_scale_for_all_activations_is_ruin(exam):
    model, ids, base, _ = exam
    assert perplexity(quantize(model, "w8a8", per="tensor"), ids) > 1.3 * base


RECORDED = sorted(data_folder().glob("quality.cpu-*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("text", ["python", "austen"])
def test_what_is_recorded(path, text):
    """Rounding that knows the inputs loses less than rounding that doesn't."""
    quality = json.loads(path.read_text())["quality"]
    ppl = {name: row["perplexity"][text] for name, row in quality.items()}
    loss = {name: p / ppl["float32"] - 1 for name, p in ppl.items()}
    assert loss["int8"] < 0.01 and loss["llm_int8"] < 0.02 and loss["smoothquant"] < 0.05
    # The file's own grid costs nothing, and is found again; a shifted one costs something.
    assert abs(loss["int4, the file's own"]) < 0.01 and abs(loss["int4"]) < 0.02
    assert abs(loss["float32, shifted"]) < 1e-4
    assert loss["awq, shifted"] < loss["gptq, shifted"] < loss["int4, shifted"]
    assert loss["3 bits, awq"] < loss["3 bits, gptq"] < loss["3 bits, gptq, one pass"]
    assert loss["3 bits, gptq, one pass"] < loss["3 bits"]
    assert loss["2:4, wanda, recovered"] < 0.5 * loss["2:4, wanda"] < 0.5 * loss["2:4, magnitude"]
    lost = {name: ppl[f"student: {name}"] / ppl["student: float32"] - 1 for name in
            ("int4", "gptq", "awq")}  # fmt: skip
    assert max(lost["gptq"], lost["awq"]) < lost["int4"]


def test_something_is_recorded():
    assert RECORDED
