"""The benchmarks: `python -m minillm bench NAME`, or `python -m minillm.bench NAME`.

Each states its bound first (bytes over measured bandwidth, or FLOPs over measured peak), then
times this package and its peers alternately in one run, and writes every repeat with hardware,
versions and date to `figures/data/NAME.HARDWARE.json`. The README's results table is generated
from those files. Results are medians; ratios come before absolute times, since machines are noisy.

    recording.py   the results file, timing of kernels         decode.py, prefill.py, attention.py,
    models.py      the models that are measured                serve.py, serve_gpu.py, load.py,
    peers.py       the same work by other libraries            quantize.py, speculate.py: one each
    tables.py      the README's tables                         gpu.py, gpu_*.py: make gpu
"""

BENCHMARKS = ("decode", "prefill", "attention", "serve", "load", "quantize", "speculate")
