"""The arguments of `python -m minillm bench`, and what it does with them."""

import argparse
import importlib

from minillm.bench import BENCHMARKS
from minillm.folders import project_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmarks."""
    named = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {named}; default: all")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--rate", type=float, help="with serve: send so many requests a second, print the latencies"
    )
    parser.add_argument("--requests", type=int, default=64, help="with --rate: how many")
    parser.add_argument(
        "--readme", action="store_true", help="measure nothing, rewrite the README's results"
    )


def run(options: argparse.Namespace) -> int:
    """Run the benchmarks that are named, or all of them; ValueError for an unknown name."""
    for name in options.names:
        if name not in BENCHMARKS:
            raise ValueError(
                f"There is no benchmark {name!r}; choose from {', '.join(BENCHMARKS)}."
            )
    if options.readme:
        from minillm.bench.tables import update_readme

        update_readme(project_folder() / "README.md")
        return 0
    from minillm.devices import device_and_dtype

    device, _ = device_and_dtype(options.device, "auto")
    if options.rate is not None:
        if options.names != ["serve"] or options.requests < 1:
            raise ValueError(
                "--rate goes with the benchmark serve and at least one request: "
                "bench serve --rate 2 --requests 64."
            )
        from minillm.bench.serve import load_test

        load_test(device, options.rate, options.requests)
        return 0
    for name in options.names or BENCHMARKS:
        path = importlib.import_module(f"minillm.bench.{name}").bench(device)
        print(f"  written to {path}")
    return 0
