"""python -m minillm.parallel generate --tp 3 "…": one model on several ranks of this machine.

It starts torchrun on itself. For several machines start torchrun on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m minillm.parallel generate --tp 8 --pp 2 --model FOLDER "…"
"""

import argparse
import os
import subprocess
import sys

from minillm.parallel.collectives import inside_torchrun, own_device, started, world_size
from minillm.tools.checks import check_whole
from minillm.tools.command_line import Parser, run


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m minillm.parallel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate")
    command = commands.add_parser("generate", help="continue a prompt")
    command.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share a layer")
    command.add_argument("--pp", type=int, default=1, metavar="N", help="stages of layers")
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
    return run(lambda: _generate(options, arguments))


def _generate(options: argparse.Namespace, arguments: list[str]) -> int:
    for name in ("tp", "pp"):
        check_whole(f"--{name}", getattr(options, name))
    size = options.tp * options.pp
    _check(options)
    if inside_torchrun():
        _rank(options, size)
        return 0
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    return subprocess.run([*start, "-m", "minillm.parallel", *arguments], check=False).returncode


def _check(options: argparse.Namespace) -> None:
    """ValueError, before any rank is started, for what the model does not allow."""
    from minillm.parallel.loading import device_and_plain_dtype
    from minillm.parallel.plan import check_size, check_stages
    from minillm.weights.loading import opened

    if options.pp > 1 or options.dtype not in ("int8", "int4"):
        device_and_plain_dtype("auto", options.dtype)
    check_whole("--max-new-tokens", options.max_new_tokens, least=0)
    with opened(options.model) as (checkpoint, tokenizer):
        check_size(checkpoint.config, options.tp)
        check_stages(checkpoint.config.n_layers, options.pp)
    if tokenizer is None:
        raise ValueError("The model's folder has no tokenizer; give one that has.")
    n, longest = len(tokenizer.encode(options.prompt)), checkpoint.config.max_seq_len
    if n + options.max_new_tokens > longest:
        raise ValueError(
            f"{n} prompt tokens and {options.max_new_tokens} new ones are more than the model's "
            f"{longest} positions; ask for fewer."
        )


def _rank(options: argparse.Namespace, size: int) -> None:
    from minillm.generation import generate
    from minillm.parallel.loading import load_pipeline, load_tensor_parallel
    from minillm.parallel.tensor import tensor_parallel
    from minillm.weights.loading import load

    if size != world_size():
        raise ValueError(f"{size} ranks are asked for, and torchrun started {world_size()}.")
    ways = {"dtype": options.dtype, "sequence_parallel": options.sequence_parallel}
    if options.pp > 1:
        stage, tokenizer = load_pipeline(options.model, n_microbatches=1, tp=options.tp, **ways)
        model, groups = stage.model, [stage.group, getattr(stage.model, "group", None)]
    elif options.dtype in ("int8", "int4"):  # cut as they are stored
        started()
        model, tokenizer = load(options.model, device=own_device(), dtype=options.dtype)
        model = tensor_parallel(model, sequence_parallel=options.sequence_parallel)
        groups = [model.group]
    else:
        model, tokenizer = load_tensor_parallel(options.model, **ways)
        groups = [model.group]
    is_first = os.environ["RANK"] == "0"
    stream = tokenizer.stream()

    def show(token: int) -> None:
        if is_first and token not in tokenizer.stop_ids:
            print(stream.push(token), end="", flush=True)

    ids = tokenizer.encode(options.prompt)
    generate(model, ids, options.max_new_tokens, stop_ids=tokenizer.stop_ids, on_token=show)
    if is_first:
        sent = sum(sum(group.sent.values()) for group in groups if group is not None)
        print(stream.flush())
        print(f"{size} ranks; rank 0 sent {sent:,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
