"""The second set of parts of `minillm.bench.gpu`: peers and lessons, which are slow to start."""

import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import median

import torch

from minillm.bench.attention import attention_peers
from minillm.bench.gpu import report
from minillm.bench.gpu_kernels import time_calls
from minillm.bench.gpu_model import large_model
from minillm.bench.models import random_model
from minillm.bench.peers import has, transformers_generate, transformers_twin
from minillm.bench.recording import Recording
from minillm.bench.serve_gpu import measure_many
from minillm.generation import generate
from minillm.measure import alternate, matmul_peak, seconds
from minillm.model import Decoder
from minillm.serving.engine import EngineConfig
from minillm.tools.folders import project_folder


def flex(recording: Recording, tiny: bool) -> None:
    """The forward kernel against compiled FlexAttention and PyTorch's own attention."""
    device = recording.device
    if device.type != "cuda":
        recording.gap("FlexAttention", "compiled for CUDA devices only")
        return
    peers, peak = attention_peers(device), matmul_peak(device, torch.bfloat16)
    for D, N in ((64, 4096), (128, 4096), (128, 16384)):
        torch.compiler.reset()
        B, H = 16384 // N, 2048 // D
        q, k, v = torch.randn(3, B, N, H, D, device=device, dtype=torch.bfloat16)
        calls = {name: partial(peer, q, k, v, True) for name, peer in peers.items()}
        flops = 4 * B * H * N**2 * D / 2
        time_calls(recording, calls, f"forward, D {D}, N {N}", flops, peak)


def transformers(recording: Recording, tiny: bool) -> None:
    """One user, against transformers' generate; many, against its continuous batching."""
    device = recording.device
    if not has("transformers", recording, "transformers"):
        return
    presets = [None] if tiny else ["smollm2-135m", "llama-3-8b"]
    n, repeats = (3, 1) if tiny else (64, 3)
    for preset in presets:
        model = random_model(preset, device) if preset else large_model(recording, tiny)
        one_user(recording, model, n, repeats)
        gc.collect()  # the twin has ended: the next one, and the peer's cache, get its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if device.type != "cuda":
        recording.gap("continuous batching", "transformers' needs a CUDA device")
        return
    config = EngineConfig(n_blocks=8192, max_seqs=256, max_batch_tokens=2048, cuda_graphs=True)
    measure_many(recording, model, config, 256, repeats=repeats)


def one_user(recording: Recording, model: Decoder, n: int, repeats: int) -> None:
    """One row: n tokens of one user. The model's twin, as large as itself, ends with this call."""
    device, prompt = recording.device, list(range(1, 9))
    twin = transformers_twin(model)
    calls = {
        "minillm": partial(generate, model, prompt, n),
        "transformers": partial(transformers_generate, twin, prompt, n),
    }
    fns = {name: partial(seconds, call, device) for name, call in calls.items()}
    took = {name: median(times) for name, times in alternate(fns, repeats).items()}
    ratio = {"transformers": took["transformers"] / took["minillm"]}
    what = f"{n} tokens of one user, with all that comes before, {model.config.name}"
    report(recording, what, n / took["minillm"], "tokens/s", against=ratio)


AT_ONCE = 4
"""Lessons side by side: the four largest fit 80 GB together (tests/test_lessons_on_a_gpu.py)."""
ENOUGH = 200.0
"""Seconds after which a lesson is stopped."""


def lessons(recording: Recording, tiny: bool) -> None:
    """Run every lesson, a few at a time; executed copies go to build/lessons-on-a-gpu.

    Their times say whether they run, not how fast: they share the GPU.
    """
    root = project_folder()
    folder = root / "build" / "lessons-on-a-gpu"
    names = sorted((root / "notebooks").glob("*.ipynb"))
    # The figures that come with the project stay as they are.
    environment = os.environ | {"MINILLM_FIGURES": str(folder / "figures"), "MPLBACKEND": "agg"}

    def run(lesson: Path) -> tuple[str, float, int | None, str]:
        command = [sys.executable, "-m", "minillm.bench.gpu_lessons", str(lesson), str(folder)]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=environment, cwd=root, timeout=ENOUGH,
            )  # fmt: skip
            code, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, said = None, (error.stdout or b"").decode(errors="replace")
        return lesson.stem, time.perf_counter() - start, code, said

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for ran in as_completed([pool.submit(run, lesson) for lesson in ([] if tiny else names)]):
            name, took, code, said = ran.result()
            print(said[-4000:], flush=True)
            report(recording, name, took, "s", exit=code, said=said.strip().splitlines()[-1:])
    if tiny:
        report(recording, "lessons found", len(names), "")
