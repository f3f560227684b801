"""The first minutes on a GPU, gone through with tiny sizes: every part, its limits and its gaps."""

import json
import subprocess
import sys

import pytest
import torch
from tiers import HAS_TRITON

from minillm.__main__ import main
from minillm.bench import gpu

CPU = torch.device("cpu")
KERNELS = {"forward", "backward", "decode-attention", "matrices"}
PARTS = [
    pytest.param(name, marks=pytest.mark.interpret if name in KERNELS else pytest.mark.slow)
    for name in gpu.PARTS
]


def test_every_part_has_a_limit():
    assert list(gpu.PARTS) == [*gpu.FIRST, *gpu.SECOND]


@pytest.mark.parametrize("name", PARTS)
def test_part(name, tmp_path, capsys):
    if name == "engine" and not HAS_TRITON:
        pytest.skip("needs the package triton, which exists for Linux")
    document = json.loads(gpu.run_part(name, CPU, tmp_path, tiny=True).read_text())
    assert document["name"] == f"gpu-{name}" and document["settings"] == {"tiny": True}
    assert document["rows"] or "CUDA device" in capsys.readouterr().out
    for row in document["rows"]:
        assert row["value"] >= 0 and row["what"]
        assert set(row.get("gaps", ())) <= {"graphs", "continuous batching", "FlexAttention"}


def test_a_part_that_hangs_or_dies_costs_no_other(tmp_path, monkeypatch, capfd):
    """Each is a process with a limit; what is not begun in time is named."""
    code = {
        "forward": "import time; time.sleep(60)",
        "backward": "import os; os.abort()",
        "model": "print('here')",
    }
    run = subprocess.run

    def stand_in(command, **options):
        assert command[:4] == [sys.executable, "-m", "minillm.bench", "gpu"]
        return run([sys.executable, "-c", code[command[5]]], **options)

    monkeypatch.setattr(subprocess, "run", stand_in)
    monkeypatch.setattr(gpu, "FIRST", {"forward": 1, "backward": 30, "model": 30})
    assert gpu.bench(CPU, tmp_path, tiny=True) == []
    out = capfd.readouterr().out
    assert "forward: stopped at its limit; what it had measured is recorded, 1 s" in out
    assert "backward: failed with exit code -6" in out and "here" in out and "model: done" in out
    monkeypatch.setattr(gpu, "MINUTES", 0.1)
    gpu.bench(CPU, tmp_path, tiny=True)
    assert capfd.readouterr().out.count("not begun, the 0.1 minutes are over") == 3


def test_a_failing_configuration_is_a_gap(tmp_path, capsys):
    from minillm.bench.gpu_kernels import _time
    from minillm.bench.recording import Recording

    def broken() -> None:
        raise RuntimeError("out of resources\nand more")

    recording = Recording("gpu-x", CPU, {}, tmp_path)
    calls = iter([("bad", broken), ("good", lambda: None), ("too good", lambda: None)])
    _time(recording, calls, "case", 1e-9, 1e30, "GB/s")
    (good, _) = recording.document["rows"]
    assert good["gaps"] == {"case, bad": "out of resources"} and good["what"] == "case, good"
    _time(recording, iter([("impossible", lambda: None)]), "case", 1e9, 1.0, "GB/s")
    assert len(recording.document["rows"]) == 2
    assert "impossible; the bound or the time is wrong" in capsys.readouterr().out


def test_it_needs_torch_and_triton_only():
    """No gguf, tokenizer, notebook or peer, so no checkpoint either."""
    missing = (
        "gguf", "xllamacpp", "transformers", "jupyterlab", "nbconvert", "tiktoken", "safetensors",
        "huggingface_hub", "matplotlib", "einops", "tqdm", "jinja2",
    )  # fmt: skip
    code = f"""
import sys, tempfile, pathlib
sys.modules |= dict.fromkeys({missing!r})
import torch
from minillm.bench import gpu
for part in ("ceilings", "model", "engine", "transformers", "lessons"):
    gpu.run_part(part, torch.device("cpu"), pathlib.Path(tempfile.mkdtemp()), True)
assert "minillm.weights" not in sys.modules
"""
    if not HAS_TRITON:
        pytest.skip("needs the package triton, which exists for Linux")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "transformers is not installed" in done.stdout
    assert "nbconvert is not installed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu", "--device", "cpu"], "bench gpu needs a CUDA device, and this is cpu; --tiny"),
        (["gpu", "decode"], "gpu is a benchmark of its own"),
        (["decode", "--tiny"], "gpu is a benchmark of its own"),
        (["gpu", "--tiny", "--device", "cpu", "--part", "x"], "There is no part 'x'; choose from"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"minillm: {said}")
