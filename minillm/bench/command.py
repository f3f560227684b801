"""The arguments of `python -m minillm bench`, and what the command does."""

import argparse
import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.bench import BENCHMARKS
from minillm.tools.folders import data_folder, project_folder

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmarks to a parser."""
    named = ", ".join(BENCHMARKS)
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help=f"any of {named}; default: all. Or gpu, and any of its parts after it",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--rate", type=float, help="with serve: send this many requests a second, print latencies"
    )
    parser.add_argument("--requests", type=int, default=64, help="with --rate: how many to send")
    parser.add_argument(
        "--http", action="store_true", help="with serve: through endpoints, against llama.cpp's"
    )
    parser.add_argument(
        "--second", action="store_true", help="with gpu: run the second, slower set of parts"
    )
    parser.add_argument(
        "--part", metavar="PART", help="with gpu: run only this part, in this process"
    )
    parser.add_argument(
        "--until", type=float, help="with --part: the time (time.time()) when it will be stopped"
    )
    parser.add_argument(
        "--minutes", type=float, help="with gpu: the time for all parts together; default: 8"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="with gpu: small sizes, only to test the code"
    )
    parser.add_argument(
        "--out", type=Path, help="with gpu: folder for the results; default: figures/data/"
    )
    parser.add_argument(
        "--readme", action="store_true", help="measure nothing; rewrite the README's results"
    )


def run(options: argparse.Namespace) -> int:
    """Run the named benchmarks, or all; ValueError for an unknown name and for unfit options."""
    _check(options)
    if options.readme:
        from minillm.bench.tables import update_tables

        update_tables(project_folder())
        return 0
    from minillm.tools.devices import device_and_dtype

    device, _ = device_and_dtype(options.device, "auto")
    if options.rate is not None:
        return _run_load_test(device, options)
    if options.names[:1] == ["gpu"]:
        return _run_gpu(device, options)
    if options.http:
        from minillm.bench.serve_http import bench as bench_http

        print(f"  written to {bench_http(device)}")
        return 0
    # These read the default checkpoint, which a machine with a GPU may not have.
    on_cpu = ("load", "quantize", "quality", "distill", "speculate")
    chosen = [name for name in BENCHMARKS if device.type != "cuda" or name not in on_cpu]
    for name in options.names or chosen:
        path = importlib.import_module(f"minillm.bench.{name}").bench(device)
        print(f"  written to {path}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """ValueError for an unknown name, and for options of the GPU's parts without them."""
    if options.http and options.names != ["serve"]:
        raise ValueError("--http goes with the benchmark serve: bench serve --http.")
    if options.names[:1] == ["gpu"]:
        return  # the other names are parts
    for name in options.names:
        if name not in (*BENCHMARKS, "gpu"):
            raise ValueError(
                f"There is no benchmark {name!r}; choose from {', '.join(BENCHMARKS)}, gpu."
            )
    o = options
    if "gpu" in o.names or o.second or o.part or o.until or o.minutes or o.tiny or o.out:
        raise ValueError(
            "gpu is a benchmark of its own, and --second, --part, --until, --minutes, --tiny and "
            "--out go with it: bench gpu --second."
        )


def _run_load_test(device: "torch.device", options: argparse.Namespace) -> int:
    if options.names != ["serve"] or options.requests < 1:
        raise ValueError(
            "--rate goes with the benchmark serve and at least one request: "
            "bench serve --rate 2 --requests 64."
        )
    from minillm.bench.serve import load_test

    load_test(device, options.rate, options.requests)
    return 0


def _run_gpu(device: "torch.device", options: argparse.Namespace) -> int:
    from minillm.bench import gpu

    if device.type != "cuda" and not options.tiny:
        raise ValueError(
            f"bench gpu needs a CUDA device, and this is {device}; --tiny tests its code on a CPU."
        )
    folder = options.out or data_folder()
    if options.part is not None:
        left = None if options.until is None else options.until - time.time()
        gpu.run_part(options.part, device, folder, options.tiny, left)
        return 0
    written = gpu.bench(
        device, folder, parts=options.names[1:], second=options.second, tiny=options.tiny,
        minutes=gpu.MINUTES if options.minutes is None else options.minutes,
    )  # fmt: skip
    for path in written:
        print(f"  written to {path}")
    return 0
