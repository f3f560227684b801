"""A prompt in one pass, with the last token's logits, against FLOPs over the matmul peak."""

from functools import partial
from pathlib import Path
from statistics import median

import torch

from minillm import costs
from minillm.bench.models import default_model
from minillm.bench.peers import has, transformers_twin
from minillm.bench.recording import Recording, dtype_name
from minillm.kv_cache import KVCache
from minillm.measure import alternate, matmul_peak, seconds
from minillm.model import Decoder
from minillm.prepacked import prepack

N_TOKENS = 512


def bench(device: torch.device) -> Path:
    """Measure the default model with a prompt of 512 tokens."""
    model, _ = default_model(device, [])
    flops = costs.prefill_flops(model.config, N_TOKENS, last_logits_only=True)
    settings = {"model": model.config.name, "prompt_tokens": N_TOKENS, "flops": flops}
    recording = Recording("prefill", device, settings)
    measure_prefill(recording, model, N_TOKENS)
    return recording.path


def measure_prefill(recording: Recording, model: Decoder, n: int, *, repeats: int = 15) -> None:
    """One row: prompt tokens per second, as a share of the bound, against transformers.

    On a CPU a second row has prepacked matrices.
    """
    device, dtype = model.device, dtype_name(model.dtype)
    flops = costs.prefill_flops(model.config, n, last_logits_only=True)
    tokens = (torch.arange(n, device=device) * 7 % model.config.vocab_size)[None]

    forms = {f"prefill of {n} tokens, {model.config.name}, {dtype}": model}
    if device.type == "cpu" and dtype == "float32":
        forms[f"prefill of {n} tokens, {model.config.name}, {dtype}, prepacked"] = prepack(model)

    @torch.inference_mode()
    def ours(model: Decoder) -> None:
        model.head(model.hidden(tokens, KVCache(model, 1, n))[:, -1])

    fns = {what: partial(seconds, partial(ours, form), device) for what, form in forms.items()}
    if has("transformers", recording, "transformers"):
        twin = transformers_twin(model)

        @torch.inference_mode()
        def theirs() -> None:
            twin(tokens, use_cache=True, logits_to_keep=1)

        fns["transformers"] = lambda: seconds(theirs, device)
    # The bound takes its turn like the others: the machine is not always equally fast.
    fns["bound"] = lambda: flops / matmul_peak(device, model.dtype)
    times = alternate(fns, repeats)
    took = {who: median(values) for who, values in times.items()}
    bound = took.pop("bound")
    print(f"{n} tokens, {flops / 1e9:.0f} GFLOP; bound {n / bound:.0f} tokens/s")
    for what in forms:
        against = {who: took[who] / took[what] for who in took if who not in forms}
        share = bound / took[what]
        print(f"  {what}: {n / took[what]:.0f} tokens/s, {share:.0%} of the bound", against)
        row = {"what": what, "value": n / took[what], "unit": "tokens/s"}
        recording.add(row | {"of_bound": share, "against": against}, times)
