"""The benchmarks: `python -m minillm bench NAME`, or `python -m minillm.bench NAME`.

Each states its bound first (bytes over measured bandwidth, or FLOPs over measured peak), then
times this package and its peers alternately in one run, and writes every repeat with hardware,
versions and date to `figures/data/NAME.HARDWARE.json`. The tables of README.md and
figures/RESULTS.md are generated from those files. Results are medians; ratios come before absolute
times, since machines are noisy.

    recording.py   the results file, timing of kernels         decode.py, prefill.py, attention.py,
    models.py      the models that are measured                serve.py, serve_gpu.py, load.py,
    peers.py       the same work by other libraries            quantize.py, quality.py,
    tables.py      the results as tables                       speculate.py: one each
    serve_http.py  the endpoint, in turns with its engine      gpu.py, gpu_*.py: make gpu
    clients.py     the endpoint, asked by others' clients: by hand
"""

BENCHMARKS = (
    "decode", "prefill", "attention", "serve", "load", "quantize", "quality", "distill",
    "speculate",
)  # fmt: skip
RECORDED = (*BENCHMARKS, "serve_http", "clients")
"""Those whose results are shown: the two last have commands of their own."""
