"""The first minutes on a GPU, gone through with tiny sizes: every part, its limits and its gaps."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiers import HAS_TRITON

from minillm.__main__ import main
from minillm.bench import command, gpu, gpu_tests
from minillm.bench import recording as recording_module

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
KERNELS = {"forward", "specialized", "backward", "decode-attention", "matrices"}
FAST = {"ceilings"}
PARTS = [
    pytest.param(
        name,
        marks=[]
        if name in FAST
        else pytest.mark.interpret
        if name in KERNELS
        else pytest.mark.slow,
    )
    for name in gpu.PARTS
    if name != "specialized-tests"  # is `tests` with other names
]


def test_every_part_has_a_limit():
    assert list(gpu.PARTS) == [*gpu.FIRST, *gpu.SECOND]
    # Correctness first; last what may hang, since no GPU has run it.
    assert list(gpu.FIRST)[:2] == ["ceilings", "tests"]
    assert list(gpu.FIRST)[-2:] == ["specialized-tests", "specialized"]


@pytest.mark.parametrize("hangs", gpu.FIRST)
def test_no_part_uses_up_the_time_of_the_others(hangs):
    """Whichever part runs into its limit: if the others take half of theirs, all of them begin."""
    left = 60 * gpu.MINUTES
    for name, most in gpu.FIRST.items():
        limit = gpu.seconds_for(name, gpu.FIRST, left)
        assert 5 <= limit <= most and (limit >= most / 2 or name.startswith("specialized"))
        left -= limit if name == hangs else min(limit, most / 2)
    assert left >= 0
    assert gpu.seconds_for("forward", gpu.FIRST, 60) <= 60
    assert gpu.seconds_for("specialized", gpu.FIRST, 4) == 0  # not even a process would start


@pytest.mark.parametrize("name", PARTS)
def test_part(name, tmp_path):
    if name in ("engine", "few-bits") and not HAS_TRITON:
        pytest.skip("needs the package triton, which exists for Linux")
    document = json.loads(gpu.run_part(name, CPU, tmp_path, tiny=True).read_text())
    assert document["name"] == f"gpu-{name}"
    assert document["settings"] == {"tiny": True, "seconds": None}
    allowed = {"graphs", "continuous batching", "FlexAttention", "tests of the default checkpoint"}
    assert set(document.get("gaps", ())) <= allowed
    assert document["rows"] or document["gaps"]
    for row in document["rows"]:
        assert row["value"] >= 0 and row["what"] and "over_bound" not in row
    what = " | ".join(row["what"] for row in document["rows"])
    assert all(word in what for word in WORDS.get(name, ())), what
    if name == "tests":
        (ran,) = document["rows"]
        assert ran["skipped"] > 300 and not ran["bad"] and ran["stopped"] is False


WORDS = {
    "engine": ("forward pass, again", "scheduling, again", "drawing tokens, again"),
    "few-bits": ("a token, int8", "a token, int4"),
    "decode-attention": ("plain pages", "int8 pages", "int4 pages", "contiguous"),
    "matrices": ("PyTorch, 16 bits", "8 bits", "4 bits"),
}
"""What some parts must have timed."""

CODE = {
    "forward": """
import json, pathlib, subprocess, sys, time
pathlib.Path(sys.argv[1], "gpu-forward.x.json").write_text(json.dumps({"rows": [2]}))
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


def ends(pid: int) -> bool:
    """Whether a process ends soon, or has ended and nobody asked for its exit code yet."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def stand_ins(monkeypatch):
    """Each part is a process that runs CODE instead; three of them, with few seconds."""
    real = gpu.run_for

    def stand_in(command, limit, log, meanwhile):
        assert command[:4] == [sys.executable, "-m", "minillm.bench", "gpu"]
        assert command[10] == "--until" and 0 < float(command[11]) - time.time() <= limit + 0.1
        code = [sys.executable, "-c", CODE[command[5]], command[9]]
        return real(code, 1 if command[5] == "forward" else limit, log, meanwhile)

    monkeypatch.setattr(gpu, "run_for", stand_in)
    monkeypatch.setattr(gpu, "FIRST", {"forward": 30, "backward": 30, "model": 30})


def test_a_part_that_hangs_or_dies_costs_no_other(tmp_path, stand_ins, capfd):
    """Each is a process with a limit, its children included; what is not begun is named."""
    path, log = gpu.bench(CPU, tmp_path, tiny=True)
    parts = json.loads(path.read_text())["parts"]
    ended = [part["ended"].partition(",")[0] for part in parts.values()]
    stopped = "stopped at its limit; what it had measured is recorded"
    assert ended == [stopped, "failed with exit code -6", "done"]
    assert (parts["forward"]["rows"], parts["model"]["rows"]) == ([2], [1])
    assert re.findall("== (.*)", log.read_text()) == ["forward", "backward", "model"]
    assert ends(int(re.search(r"child (\d+)", log.read_text())[1])), "the part's child still runs"
    capfd.readouterr()
    gpu.bench(CPU, tmp_path, tiny=True, minutes=0.01)
    assert capfd.readouterr().out.count("not begun, the 0.01 minutes are over") == 3


def test_some_parts_only(tmp_path, stand_ins):
    path, _ = gpu.bench(CPU, tmp_path, parts=["model"], tiny=True)
    assert path.name.startswith("gpu-chosen.")
    assert json.loads(path.read_text())["parts"]["model"]["rows"] == [1]


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    """The rows of the part in progress as well."""
    real = gpu.run_for

    def stand_in(command, limit, log, meanwhile):
        real([sys.executable, "-c", CODE["model"], command[9]], limit, log, meanwhile)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_for", stand_in)
    with pytest.raises(KeyboardInterrupt):
        gpu.bench(CPU, tmp_path, parts=["model", "forward"], tiny=True)
    (path,) = tmp_path.glob("gpu-chosen.*.json")
    (part,) = json.loads(path.read_text())["parts"].values()
    assert part["rows"] == [1] and part["ended"].startswith("interrupted")


def test_rows_are_collected_while_a_part_runs(tmp_path):
    """And whatever stops this process ends the part as well."""
    seen = []
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        ended = gpu.run_for([sys.executable, "-c", code], 0.3, log.fileno(), lambda: seen.append(1))
        assert seen and ended.startswith("stopped at its limit;")

        def interrupted():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gpu.run_for([sys.executable, "-c", code], 1.0, log.fileno(), interrupted)
    assert all(map(ends, map(int, (tmp_path / "log").read_text().split())))


def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch, tmp_path):
    """One that hangs in the driver: it gets its signal, and a few seconds."""
    waits = []

    class Stuck:
        pid = 2**30

        def wait(self, limit):
            waits.append(limit)
            raise subprocess.TimeoutExpired("x", limit)

        def poll(self):
            return None

    monkeypatch.setattr(gpu.subprocess, "Popen", lambda *_, **__: Stuck())
    monkeypatch.setattr(gpu.os, "killpg", lambda *_: None)
    ended = gpu.run_for(["x"], 0.01, 0, lambda: None)
    assert "does not end even when killed" in ended and max(waits) <= 5


def test_tests_are_stopped_in_time_and_what_they_said_is_kept():
    """In this process group, so that whoever stops the part stops them."""
    code = (
        "import os, time; print('PASSED tests/x.py::a', os.getpgid(0), flush=True); time.sleep(60)"
    )
    start = time.monotonic()
    stopped, lines = gpu_tests.printed([sys.executable, "-c", code], 1.0)
    assert stopped and time.monotonic() - start < 30
    assert lines[0].split() == ["PASSED", "tests/x.py::a", str(os.getpgid(0))]


def test_what_was_tested_is_counted_even_if_it_was_stopped(monkeypatch, tmp_path):
    asked = []
    lines = [
        "[gw0] [ 1%] PASSED tests/x.py::a \n",
        "[gw1] [ 2%] FAILED tests/x.py::b[1, 2] \n",
        "FAILED tests/x.py::b[1, 2] - AssertionError: 1 - 2\n",
        "ERROR tests/y.py - ModuleNotFoundError: No module named 'hypothesis'\n",
    ]

    def printed(command, limit):
        asked.append((command[command.index("-k") + 1], limit))
        return True, lines

    monkeypatch.setattr(gpu_tests, "printed", printed)
    path = gpu.run_part("specialized-tests", CPU, tmp_path, True, 40)
    (row,) = json.loads(path.read_text())["rows"]
    assert asked == [("specialized", 25)] and row["stopped"] is True
    assert (row["passed"], row["failed"], row["error"]) == (1, 1, 1)
    assert row["bad"] == ["tests/x.py::b[1, 2]", "tests/y.py"]


def test_a_failing_part_records_why(tmp_path, monkeypatch):
    def fails(recording, tiny):
        gpu.report(recording, "a row", 1, "s")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "ceilings", fails)
    with pytest.raises(RuntimeError):
        gpu.run_part("ceilings", CPU, tmp_path, True)
    (path,) = tmp_path.glob("gpu-ceilings.*.json")
    document = json.loads(path.read_text())
    assert [row["what"] for row in document["rows"]] == ["a row"]
    assert "in fails" in document["traceback"] and "illegal memory" in document["traceback"]


def test_a_failing_configuration_is_a_gap(tmp_path):
    from minillm.bench.gpu_kernels import time_calls
    from minillm.bench.recording import Recording

    def broken() -> None:
        raise RuntimeError("out of resources\nand more")

    recording = Recording("gpu-x", CPU, {}, tmp_path)
    calls = {"bad": broken, "good": lambda: None, "too good": lambda: None}
    time_calls(recording, calls, "case", 1e-9, 1e30, memory=True)
    (good, _) = recording.document["rows"]
    assert good["gaps"] == {"case, bad": "out of resources"} and good["what"] == "case, good"
    assert recording.document["gaps"] == {"case, bad": "out of resources"}
    time_calls(recording, {"too fast": lambda: None}, "case", {"too fast": 1e9}, 1.0, memory=True)
    row = recording.document["rows"][-1]
    assert row["over_bound"] > 1 and "of_bound" not in row  # kept, and marked
    assert json.loads(recording.path.read_text()) == recording.document


def test_all_are_compiled_before_any_is_timed_and_then_they_take_turns(monkeypatch):
    """The first one listed must not be the one with the idle clocks."""
    seen = []

    def timed(fn, device, *, as_graph, rep):
        fn()
        return len(seen)

    def fails_when_timed():
        seen.append("d")
        if seen.count("d") == 2:
            raise RuntimeError("in the graph")

    monkeypatch.setattr(recording_module, "kernel_seconds", timed)
    monkeypatch.setattr(recording_module, "seconds", lambda fn, device: fn())
    calls = {name: partial(seen.append, name) for name in "abc"} | {"d": fails_when_timed}
    times, failed = recording_module.seconds_in_turn(calls, torch.device("cuda"), as_graph=True)
    assert "".join(seen) == "abcd" + "abcd" + "cba"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert failed == {"d": "in the graph"}


def test_a_graph_is_replayed_with_all_that_it_reads(monkeypatch, tmp_path):
    """The profiler replays each one once more, at the end: nothing of it may be freed by then."""
    from minillm.bench import gpu_model
    from minillm.bench.recording import Recording

    class Sequence:
        def __init__(self, *_):
            graph = SimpleNamespace(owner=weakref.ref(self))
            graph.replay = lambda: alive.append(graph.owner() is not None)
            self._graphs = SimpleNamespace(_graphs={1: (graph,)})

        def __call__(self, tokens):
            return torch.zeros(3)

    alive: list[bool] = []
    monkeypatch.setattr(gpu_model, "GraphedSequence", Sequence)
    monkeypatch.setattr(gpu_model, "_profile", lambda recording, name, graph: graph[1].replay())
    recording = Recording("gpu-x", CPU, {}, tmp_path)
    gpu_model._graphs(recording, SimpleNamespace(fast=None), [1, 2], 3, 1e-30)
    assert len(recording.document["rows"]) == 4 and all(alive[-2:])


def test_one_twin_at_a_time(monkeypatch, tmp_path, tiny):
    """A twin is as large as its model: it ends before anything else is made."""
    from minillm.bench import gpu_second
    from minillm.bench.recording import Recording

    class Twin:
        pass

    twins: list[weakref.ref] = []

    def twin_of(model):
        made = Twin()
        twins.append(weakref.ref(made))
        return made

    monkeypatch.setattr(gpu_second, "transformers_twin", twin_of)
    monkeypatch.setattr(gpu_second, "transformers_generate", lambda twin, prompt, n: None)
    gpu_second.one_user(Recording("gpu-x", CPU, {}, tmp_path), tiny, 2, 1)
    assert [twin() for twin in twins] == [None]


@pytest.mark.slow
def test_a_twin_is_born_in_the_models_dtype(tiny):
    """Never larger. What transformers itself keeps in float32, its frequencies, stays so."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    from minillm.bench.peers import transformers_twin

    twin = transformers_twin(tiny.bfloat16())
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert twin.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_stuck_peer_is_not_waited_for(monkeypatch):
    from minillm.bench import peers

    manager = SimpleNamespace(
        add_request=lambda *_, **__: None, get_result=lambda timeout: None, is_running=lambda: True
    )
    twin = SimpleNamespace(continuous_batching_context_manager=lambda **_: nullcontext(manager))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(GenerationConfig=dict))
    monkeypatch.setattr(peers, "PATIENCE", 0.01)
    request = SimpleNamespace(prompt_ids=[1], max_new_tokens=2)
    with (
        peers.transformers_continuous(twin) as serve,
        pytest.raises(RuntimeError, match="stopped before all requests were done"),
    ):
        serve([request])


def test_the_readmes_commands_are_understood():
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("Without a GPU, with one")[1]
    given = re.findall(r"-m minillm\.bench (gpu[^`\n#]*)", text)
    assert len(given) == 3
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for line in given:
        options = parser.parse_args(line.split())
        assert options.names[0] == "gpu" and set(options.names[1:]) <= set(gpu.PARTS)
    assert "--minutes" in text and "gpu-first.CHIP.log" in text


@pytest.mark.parametrize("kind", ["python3", ".venv"])
def test_make_gpu_needs_neither_a_network_nor_an_environment(kind, tmp_path):
    """It uses .venv where `make setup` has made it, else the Python at hand; no installing."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python" if kind == ".venv" else tmp_path / "python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text('#!/bin/sh\necho "$0: $*"\n')
    python.chmod(0o755)
    if kind == ".venv":
        (tmp_path / ".venv" / "ready").touch()
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={tmp_path / 'python3'}", "MINUTES=3"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    ran = out.strip().splitlines()[-1]
    assert ran.endswith("python3: -m minillm.bench gpu --minutes 3") or kind == ".venv"
    assert ran.endswith(".venv/bin/python: -m minillm.bench gpu --minutes 3") or kind != ".venv"
    python.write_text("#!/bin/sh\nexit 1\n")  # has no torch
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode and "run make setup first" in done.stdout


def test_it_needs_torch_and_triton_only():
    """No gguf, tokenizer, notebook or peer, so no checkpoint either."""
    missing = (
        "gguf", "xllamacpp", "transformers", "jupyterlab", "nbclient", "tiktoken", "safetensors",
        "huggingface_hub", "matplotlib", "einops", "tqdm", "jinja2",
    )  # fmt: skip
    code = f"""
import sys, tempfile, pathlib
sys.modules |= dict.fromkeys({missing!r})
import torch
from minillm.bench import gpu
for part in ("ceilings", "model", "engine", "few-bits", "transformers", "lessons"):
    gpu.run_part(part, torch.device("cpu"), pathlib.Path(tempfile.mkdtemp()), True)
assert "minillm.weights" not in sys.modules
"""
    if not HAS_TRITON:
        pytest.skip("needs the package triton, which exists for Linux")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "transformers is not installed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu", "--device", "cpu"], "bench gpu needs a CUDA device, and this is cpu; --tiny"),
        (["gpu", "decode", "--tiny", "--device", "cpu"], "There is no part 'decode'; choose from"),
        (["decode", "gpu"], "gpu is a benchmark of its own"),
        (["decode", "--minutes", "3"], "gpu is a benchmark of its own"),
        (["gpu", "--tiny", "--device", "cpu", "--minutes", "-1"], "--minutes is -1; give a posit"),
        (["decode", "--tiny"], "gpu is a benchmark of its own"),
        (["gpu", "--tiny", "--device", "cpu", "--part", "x"], "There is no part 'x'; choose from"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"minillm: {said}")
