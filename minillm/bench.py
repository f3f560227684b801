"""The benchmarks: `python -m minillm bench NAME`, or `python -m minillm.bench NAME`.

Each states its bound first (bytes over measured bandwidth, or FLOPs over measured peak), then times this package and
its peer alternately in one run, and writes every repeat with hardware, versions and date to
`figures/data/NAME.HARDWARE.json`. The README's results table is generated from those files. Medians; ratios before
absolute times, because machines are noisy.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from minillm import costs
from minillm.config import ModelConfig
from minillm.generate import generate
from minillm.hardware import cpu_name, matmul_peak, read_bandwidth, seconds
from minillm.kv_cache import KVCache
from minillm.model import Decoder
from minillm.plots import data_folder, project_folder
from minillm.weights import device_and_dtype, fetch_default, load, parameter_sources

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def hardware_label(device: torch.device) -> str:
    """Short name for file names and tables: "nvidia-h200", or "cpu-2-threads"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()} threads"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def record(name: str, device: torch.device, settings: dict[str, Any], rows: list[dict[str, Any]], repeats: dict[str, list[float]]) -> Path:
    """Write one benchmark's result; `rows` are what the README shows, `repeats` all raw numbers behind them."""
    label = hardware_label(device)
    packages = ["torch", "triton", "numpy", "transformers"]
    document = {
        "name": name,
        "hardware": {"label": label, "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()},
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "date": datetime.date.today().isoformat(),
        "settings": settings,
        "rows": rows,
        "repeats": repeats,
    }
    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{label}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def alternate(fns: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each function twice to warm up, then `repeats` times in turn, every other round in the opposite order, so
    that nobody always runs first. Each function returns its own measurement."""
    results: dict[str, list[float]] = {name: [] for name in fns}
    for i in range(repeats + 2):
        for name in list(fns) if i % 2 else reversed(fns):
            results[name].append(fns[name]())
    return {name: values[2:] for name, values in results.items()}


def transformers_twin(model: Decoder) -> "LlamaForCausalLM":
    """The same weights in Hugging Face transformers' Llama: the peer of the benchmarks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.d_head, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_seq_len, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
    )  # fmt: skip
    with torch.device(model.device):
        twin = LlamaForCausalLM(config).to(model.dtype).eval()
    theirs, ours = dict(twin.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        for name, parts in parameter_sources(c).items():
            for part, rows in zip(parts, ours[name].split([shape[0] for shape in parts.values()]), strict=True):
                theirs[part].copy_(rows)
    return twin


# decode


def decode_seconds(generate_n: Callable[[int], Any], n: int, device: torch.device) -> float:
    """Seconds per decoded token: a run of n + 1 new tokens minus a run of one, so that prefill cancels."""
    return (seconds(lambda: generate_n(n + 1), device) - seconds(lambda: generate_n(1), device)) / n


def bench_decode(device: torch.device) -> list[Path]:
    """Greedy cached decoding, batch 1, against the time to read all weights, and against transformers' generate.

    Where the time goes on two CPU threads, SmolLM2-135M in float32 (a bound of 16.4 ms, 26 ms measured): the matrix
    products alone take 19.7 ms, because each of the 121 pays a start-up; the rest is the dozen small operations
    between two products. The same operations take 3.2 ms when no product is run: the weights sweep the caches, and
    Python and PyTorch are fetched from memory anew after each. Tried without gain: weights in huge pages (0%),
    oneDNN's and MKL's packed weights (slower, equal), torch.compile around the small operations (8% slower). Gained:
    one product for q, k, v and one for gate, up; rotary positions as two fused operations; no mask and no expanded
    heads for one token; one module a layer. Stored transposed, the weights are read 3% faster; not worth the puzzle.
    """
    model, tokenizer = load(device=device)
    prompt = tokenizer.encode("The three laws of robotics are")
    settings = {"model": model.config.name, "prompt_tokens": len(prompt), "new_tokens": 64}
    rows, repeats = _decode(model, prompt, 64, device, peer=True)
    if device.type == "cuda":
        del model
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            large = Decoder(ModelConfig.preset("llama-3-8b")).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        more_rows, more_repeats = _decode(large, prompt, 64, device, peer=False)
        rows += more_rows
        repeats |= {f"llama-3-8b {name}": values for name, values in more_repeats.items()}
    return [record("decode", device, settings, rows, repeats)]


def _decode(
    model: Decoder, prompt: list[int], n: int, device: torch.device, peer: bool
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    dtype = str(model.dtype).removeprefix("torch.")
    moved = costs.decode_bytes(model.config, 1, len(prompt) + n // 2, dtype)
    fns = {"minillm": lambda: decode_seconds(lambda k: generate(model, prompt, k), n, device)}
    if peer:
        twin, ids = transformers_twin(model), torch.tensor([prompt], device=device)
        fns["transformers"] = lambda: decode_seconds(
            lambda k: twin.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=k, min_new_tokens=k, do_sample=False, pad_token_id=0
            ),
            n,
            device,
        )
    repeats = {"bandwidth": [read_bandwidth(device, model.dtype) for _ in range(7)]} | alternate(fns, 7)
    ours, bound = median(repeats["minillm"]), moved / median(repeats["bandwidth"])
    print(f"decode, {model.config.name}, {dtype}: each token reads {moved / 1e6:.0f} MB")
    print(f"  bound at {median(repeats['bandwidth']) / 1e9:.1f} GB/s: {bound * 1e3:6.2f} ms")
    print(f"  minillm:             {ours * 1e3:6.2f} ms   {bound / ours:.0%} of the bound")
    row = {"what": f"decode, {model.config.name}, {dtype}", "value": 1 / ours, "unit": "tokens/s", "of_bound": bound / ours}
    if peer:
        theirs = median(repeats["transformers"])
        row["against_transformers"] = theirs / ours
        print(f"  transformers:        {theirs * 1e3:6.2f} ms   minillm is {theirs / ours:.2f} times as fast")
    return [row], repeats


# prefill


def bench_prefill(device: torch.device) -> list[Path]:
    """A prompt of 512 tokens in one pass, logits of the last, against FLOPs over the measured matmul peak."""
    n = 512
    model, _ = load(device=device)
    dtype = str(model.dtype).removeprefix("torch.")
    twin = transformers_twin(model)
    tokens = torch.arange(1000, 1000 + n, device=device)[None]
    flops = costs.prefill_flops(model.config, n, last_logits_only=True)

    @torch.inference_mode()
    def ours() -> None:
        model.head(model.hidden(tokens, KVCache(model, 1, n))[:, -1])

    @torch.inference_mode()
    def theirs() -> None:
        twin(tokens, use_cache=True, logits_to_keep=1)

    peaks = [matmul_peak(device, model.dtype) for _ in range(7)]
    fns = {"minillm": lambda: seconds(ours, device), "transformers": lambda: seconds(theirs, device)}
    repeats = {"peak": peaks} | alternate(fns, 15)
    mine, peer = median(repeats["minillm"]), median(repeats["transformers"])
    bound = flops / median(repeats["peak"])
    print(f"prefill, {model.config.name}, {dtype}: {n} tokens, {flops / 1e9:.0f} GFLOP")
    print(f"  bound at {median(repeats['peak']) / 1e9:.0f} GFLOP/s: {n / bound:7.0f} tokens/s")
    print(f"  minillm:               {n / mine:7.0f} tokens/s   {bound / mine:.0%} of the bound")
    print(f"  transformers:          {n / peer:7.0f} tokens/s   minillm is {peer / mine:.2f} times as fast")
    row = {
        "what": f"prefill of {n} tokens, {model.config.name}, {dtype}",
        "value": n / mine,
        "unit": "tokens/s",
        "of_bound": bound / mine,
        "against_transformers": peer / mine,
    }
    return [record("prefill", device, {"model": model.config.name, "prompt_tokens": n, "flops": flops}, [row], repeats)]


# load

# VmHWM is the process's own peak; getrusage, which exists everywhere, starts from the parent's peak on Linux.
_LOAD_PROBE = """
import pathlib, re, resource, sys, time
import gguf, tiktoken, torch
import minillm, minillm.weights

def peak_bytes():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS

before = peak_bytes()
start = time.perf_counter()
model, _ = minillm.load(device=sys.argv[1])
elapsed = time.perf_counter() - start
print(elapsed, peak_bytes() - before, sum(p.nbytes for p in model.parameters()))
"""


def bench_load(device: torch.device) -> list[Path]:
    """Loading the default checkpoint in a fresh process: seconds, and peak memory over the model's own bytes."""
    default = fetch_default()
    repeats: dict[str, list[float]] = {"seconds": [], "peak_bytes": [], "model_bytes": []}
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", _LOAD_PROBE, str(device)], capture_output=True, text=True, check=True).stdout
        for key, value in zip(repeats, map(float, out.split()), strict=True):
            repeats[key].append(value)
    took = median(repeats["seconds"])
    rows: list[dict[str, Any]] = [{"what": "load the default checkpoint", "value": took, "unit": "s"}]
    print(f"load: {took:.2f} s")
    if device.type == "cpu":  # on a GPU the model is not in the memory that is counted here
        peak, model_bytes = median(repeats["peak_bytes"]), median(repeats["model_bytes"])
        rows.append({"what": "peak memory while loading, over the model's bytes", "value": peak / model_bytes, "unit": "×"})
        print(f"  peak memory {peak / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB: {peak / model_bytes:.2f} times")
    return [record("load", device, {"model": default.stem}, rows, repeats)]


BENCHMARKS: dict[str, Callable[[torch.device], list[Path]]] = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "load": bench_load,
}


# The README's tables


def results_table(folder: Path) -> str:
    """The results as a Markdown table, from the JSON files of `record`; a benchmark without a GPU file is named as such."""
    lines = ["| benchmark | hardware | result | of the bound | against transformers |", "| --- | --- | --- | --- | --- |"]
    for name in BENCHMARKS:
        on_gpu = False
        for path in sorted(folder.glob(f"{name}.*.json")):
            document = json.loads(path.read_text())
            label = document["hardware"]["label"]
            on_gpu |= not label.startswith("cpu")
            for row in document["rows"]:
                share = f"{row['of_bound']:.0%}" if "of_bound" in row else "–"
                ratio = f"{row['against_transformers']:.2f} ×" if "against_transformers" in row else "–"
                value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
                lines.append(f"| {row['what']} | {label} | {value} {row['unit']} | {share} | {ratio} |")
        if not on_gpu:
            lines.append(f"| {name} | any GPU | not measured yet | – | – |")
    return "\n".join(lines)


_MARKERS = ("<!-- results, written by python -m minillm.bench --readme -->", "<!-- end of results -->")


def update_readme(readme: Path) -> None:
    """Put the current `results_table` between the README's two markers."""
    before, rest = readme.read_text(encoding="utf-8").split(_MARKERS[0])
    after = rest.split(_MARKERS[1])[1]
    readme.write_text(f"{before}{_MARKERS[0]}\n{results_table(data_folder())}\n{_MARKERS[1]}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks named on the command line, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m minillm.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all if none is named")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--readme", action="store_true", help="measure nothing, only rewrite the README's results table")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in BENCHMARKS:
            raise ValueError(f"There is no benchmark {name!r}; choose from {', '.join(BENCHMARKS)}.")
    if options.readme:
        update_readme(project_folder() / "README.md")
        return 0
    device, _ = device_and_dtype(options.device, "auto")
    for name in options.names or BENCHMARKS:
        for path in BENCHMARKS[name](device):
            print(f"  written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
