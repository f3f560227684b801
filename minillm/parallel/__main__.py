"""python -m minillm.parallel generate --tp 3 "…": one model on several ranks of this machine.

The command starts torchrun on itself. For several machines, start torchrun on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m minillm.parallel generate --tp 8 --pp 2 --model FOLDER "…"
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from minillm.parallel.collectives import Group, check_world_size, inside_torchrun
from minillm.parallel.ranks import run_command
from minillm.tools.checks import check_request, check_whole
from minillm.tools.command_line import Parser, run

if TYPE_CHECKING:
    from minillm.model import Decoder
    from minillm.tokenizer import Tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m minillm.parallel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate")
    command = commands.add_parser("generate", help="continue a prompt")
    command.add_argument("--tp", type=int, default=1, metavar="N", help="ranks per layer")
    command.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    command.add_argument(
        "--sequence-parallel", action="store_true", help="with --tp: split the sequence as well"
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
    check_whole("--tp", options.tp)
    check_whole("--pp", options.pp)
    size = options.tp * options.pp
    _check(options)
    if inside_torchrun():  # this process is one of the ranks
        _run_rank(options, size)
        return 0
    run_command(size, "minillm.parallel", *arguments)
    return 0


def _check(options: argparse.Namespace) -> None:
    """ValueError, before any rank starts, for options that do not fit the model."""
    from minillm.parallel.loading import check_split

    config, tokenizer = check_split(options.model, options.dtype, options.tp, options.pp)
    ids = tokenizer.encode(options.prompt)
    check_request(config, ids, options.max_new_tokens, tokenizer.stop_ids)


def _load(options: argparse.Namespace) -> "tuple[Decoder, Tokenizer, list[Group]]":
    """This rank's part of the model, the tokenizer, and the groups whose ledgers count."""
    from minillm.parallel.loading import load_pipeline, load_tensor_parallel

    dtype, sequence_parallel = options.dtype, options.sequence_parallel
    if options.pp > 1:
        stage, tokenizer = load_pipeline(
            options.model, n_microbatches=1, tp=options.tp, dtype=dtype,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        groups = (stage.group, stage.tensor_group)
        return stage.model, tokenizer, [group for group in groups if group is not None]
    model, tokenizer = load_tensor_parallel(
        options.model, dtype=dtype, sequence_parallel=sequence_parallel
    )
    return model, tokenizer, [model.group]


def _run_rank(options: argparse.Namespace, size: int) -> None:
    """Generate together with the other ranks; rank 0 prints."""
    from minillm.generation import generate

    check_world_size("--tp and --pp", size)
    model, tokenizer, groups = _load(options)
    is_first = os.environ["RANK"] == "0"  # all ranks produce the same tokens
    stream = tokenizer.stream()

    def show(token: int) -> None:
        if is_first and token not in tokenizer.stop_ids:
            print(stream.push(token), end="", flush=True)

    ids = tokenizer.encode(options.prompt)
    generate(model, ids, options.max_new_tokens, stop_ids=tokenizer.stop_ids, on_token=show)
    if is_first:
        sent = sum(sum(group.sent.values()) for group in groups)
        print(stream.flush())
        print(f"{size} ranks; rank 0 sent {sent:,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
