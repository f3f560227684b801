"""The first minutes on a GPU, gone through with tiny sizes: every part, its limits and its gaps."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiers import HAS_TRITON

from minillm.__main__ import main
from minillm.bench import gpu

CPU = torch.device("cpu")
KERNELS = {"forward", "specialized", "backward", "decode-attention", "matrices"}
PARTS = [
    pytest.param(name, marks=pytest.mark.interpret if name in KERNELS else pytest.mark.slow)
    for name in gpu.PARTS
]


def test_every_part_has_a_limit():
    assert list(gpu.PARTS) == [*gpu.FIRST, *gpu.SECOND]
    assert list(gpu.FIRST)[-1] == "tests"  # several processes, with which nothing can be timed


@pytest.mark.parametrize("name", PARTS)
def test_part(name, tmp_path):
    if name == "engine" and not HAS_TRITON:
        pytest.skip("needs the package triton, which exists for Linux")
    document = json.loads(gpu.run_part(name, CPU, tmp_path, tiny=True).read_text())
    assert document["name"] == f"gpu-{name}" and document["settings"] == {"tiny": True}
    allowed = {"graphs", "continuous batching", "FlexAttention", "tests of the default checkpoint"}
    assert set(document.get("gaps", ())) <= allowed
    assert document["rows"] or document["gaps"]
    for row in document["rows"]:
        assert row["value"] >= 0 and row["what"] and "over_bound" not in row
    if name == "tests":
        first, second = document["rows"]
        assert first["skipped"] > 300 and second["skipped"] > 2 and not first["bad"]


CODE = {
    "forward": """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
""",
    "backward": "import os; os.abort()",
    "model": """
import json, pathlib, sys
pathlib.Path(sys.argv[1], "gpu-model.x.json").write_text(json.dumps({"rows": [1]}))
""",
}


def test_a_part_that_hangs_or_dies_costs_no_other(tmp_path, monkeypatch, capfd):
    """Each is a process with a limit, its children included; what is not begun is named."""
    real = gpu.run_for

    def stand_in(command, limit):
        assert command[:4] == [sys.executable, "-m", "minillm.bench", "gpu"]
        return real([sys.executable, "-c", CODE[command[5]], command[9]], limit)

    monkeypatch.setattr(gpu, "run_for", stand_in)
    monkeypatch.setattr(gpu, "FIRST", {"forward": 1, "backward": 30, "model": 30})
    (path,) = gpu.bench(CPU, tmp_path, tiny=True)
    parts = json.loads(path.read_text())["parts"]
    ended = [part["ended"].partition(",")[0] for part in parts.values()]
    stopped = "stopped at its limit; what it had measured is recorded"
    assert ended == [stopped, "failed with exit code -6", "done"]
    assert parts["model"]["rows"] == [1]
    out = capfd.readouterr().out
    child = int(re.search(r"child (\d+)", out)[1])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
            break  # ended, and nobody has asked for its exit code
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists(), "the part's child still runs"
    monkeypatch.setattr(gpu, "MINUTES", 0.1)
    gpu.bench(CPU, tmp_path, tiny=True)
    assert capfd.readouterr().out.count("not begun, the 0.1 minutes are over") == 3


def test_a_failing_configuration_is_a_gap(tmp_path):
    from minillm.bench.gpu_kernels import time_calls
    from minillm.bench.recording import Recording

    def broken() -> None:
        raise RuntimeError("out of resources\nand more")

    recording = Recording("gpu-x", CPU, {}, tmp_path)
    calls = iter([("bad", broken), ("good", lambda: None), ("too good", lambda: None)])
    time_calls(recording, calls, "case", 1e-9, 1e30, memory=True)
    (good, _) = recording.document["rows"]
    assert good["gaps"] == {"case, bad": "out of resources"} and good["what"] == "case, good"
    assert recording.document["gaps"] == {"case, bad": "out of resources"}
    time_calls(recording, iter([("too fast", lambda: None)]), "case", 1e9, 1.0, memory=True)
    row = recording.document["rows"][-1]
    assert row["over_bound"] > 1 and "of_bound" not in row  # kept, and marked
    assert json.loads(recording.path.read_text()) == recording.document


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
