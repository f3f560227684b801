"""python -m minillm.parallel generate --tp 3 "…": one model on several ranks of this machine.

It starts torchrun on itself. For several machines start torchrun on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m minillm.parallel generate --tp 16 --model FOLDER "…"
"""

import argparse
import subprocess
import sys

from minillm.parallel.collectives import inside_torchrun, world_size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minillm.parallel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate")
    command = commands.add_parser("generate", help="continue a prompt")
    way = command.add_mutually_exclusive_group(required=True)
    way.add_argument("--tp", type=int, metavar="N", help="tensor parallelism over N ranks")
    way.add_argument("--pp", type=int, metavar="N", help="pipeline parallelism over N ranks")
    command.add_argument(
        "--sequence-parallel", action="store_true", help="with --tp: cut the sequence as well"
    )
    command.add_argument("--model", help="a folder, a .gguf file or a hub id")
    command.add_argument("--dtype", default="auto", help="as in python -m minillm generate")
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    command.add_argument("prompt")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Start the ranks, or be one of them; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    size = options.tp or options.pp
    try:
        if inside_torchrun():
            _rank(options, size)
            return 0
        if size is None or size < 1:
            raise ValueError(f"The number of ranks is {size}; give 1 or more.")
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
        return subprocess.run([*run, "-m", "minillm.parallel", *arguments], check=False).returncode
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"minillm: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2


def _rank(options: argparse.Namespace, size: int) -> None:
    from minillm.generate import generate
    from minillm.parallel.pipeline import pipeline_parallel
    from minillm.parallel.tensor import tensor_parallel
    from minillm.weights import load

    if size != world_size():
        raise ValueError(f"{size} ranks are asked for, and torchrun started {world_size()}.")
    model, tokenizer = load(options.model, dtype=options.dtype)
    if options.tp:
        model = tensor_parallel(model, sequence_parallel=options.sequence_parallel)
        group = model.group
    else:
        stage = pipeline_parallel(model, n_microbatches=1)
        model, group = stage.model, stage.group
    if tokenizer is None:
        raise ValueError("The model's folder has no tokenizer; give one that has.")
    stream = tokenizer.stream()

    def show(token: int) -> None:
        if group.rank == 0:
            print(stream.push(token), end="", flush=True)

    ids = tokenizer.encode(options.prompt)
    generate(model, ids, options.max_new_tokens, stop_ids=tokenizer.stop_ids, on_token=show)
    if group.rank == 0:
        print(f"\n{group.size} ranks; rank 0 sent {sum(group.sent.values()):,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
