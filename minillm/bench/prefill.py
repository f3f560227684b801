"""A prompt in one pass, logits of the last token, against FLOPs over the measured matmul peak."""

from pathlib import Path
from statistics import median

import torch

from minillm import costs
from minillm.bench.models import default_model
from minillm.bench.peers import has, transformers_twin
from minillm.bench.recording import Recording, alternate, dtype_name
from minillm.kv_cache import KVCache
from minillm.measure import matmul_peak, seconds
from minillm.model import Decoder

N_TOKENS = 512


def bench(device: torch.device) -> Path:
    """The default model, with a prompt of 512 tokens."""
    model, _ = default_model(device, [])
    flops = costs.prefill_flops(model.config, N_TOKENS, last_logits_only=True)
    settings = {"model": model.config.name, "prompt_tokens": N_TOKENS, "flops": flops}
    recording = Recording("prefill", device, settings)
    measure_prefill(recording, model, N_TOKENS)
    return recording.path


def measure_prefill(recording: Recording, model: Decoder, n: int, *, repeats: int = 15) -> None:
    """One row: prompt tokens per second, of the bound, and against transformers."""
    device, dtype = model.device, dtype_name(model.dtype)
    flops = costs.prefill_flops(model.config, n, last_logits_only=True)
    tokens = (torch.arange(n, device=device) * 7 % model.config.vocab_size)[None]

    @torch.inference_mode()
    def ours() -> None:
        model.head(model.hidden(tokens, KVCache(model, 1, n))[:, -1])

    fns = {"minillm": lambda: seconds(ours, device)}
    if has("transformers", recording, "transformers"):
        twin = transformers_twin(model)

        @torch.inference_mode()
        def theirs() -> None:
            twin(tokens, use_cache=True, logits_to_keep=1)

        fns["transformers"] = lambda: seconds(theirs, device)
    peaks = [matmul_peak(device, model.dtype) for _ in range(7)]
    times = alternate(fns, repeats)
    took = {who: median(values) for who, values in times.items()}
    mine, bound = took.pop("minillm"), flops / median(peaks)
    print(f"prefill, {model.config.name}, {dtype}: {n} tokens, {flops / 1e9:.0f} GFLOP")
    print(f"  bound at {median(peaks) / 1e9:.0f} GFLOP/s: {n / bound:7.0f} tokens/s")
    print(f"  minillm:               {n / mine:7.0f} tokens/s   {bound / mine:.0%} of the bound")
    for who, peer in took.items():
        print(f"  {who + ':':22} {n / peer:7.0f} tokens/s   minillm is {peer / mine:.2f} × as fast")
    row = {
        "what": f"prefill of {n} tokens, {model.config.name}, {dtype}",
        "value": n / mine,
        "unit": "tokens/s",
        "of_bound": bound / mine,
        "against": {who: peer / mine for who, peer in took.items()},
    }
    recording.add(row, {"peak": peaks} | times)
