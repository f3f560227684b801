"""The command `python -m minillm serve`: its options, the engine they describe, and its life.

With --tp N the command starts torchrun on itself, and each of the N processes is a rank. Rank 0 is
the server; the others compute what its engine tells them. Once they serve, a signal is for rank 0:
it lets requests finish and then releases the others, which only listen to it.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from minillm.tools.checks import check_whole

if TYPE_CHECKING:
    from minillm.model import Decoder
    from minillm.serving.engine import Engine
    from minillm.speculation.drafters import Drafter
    from minillm.tokenizer import Tokenizer

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_DRAFTERS = ("ngram", "student", "medusa")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the server's options to a parser."""
    add = parser.add_argument
    add(
        "--model", help="a folder in Hugging Face format, a .gguf file or a hub id; default: "
        "SmolLM2-135M-Instruct",
    )  # fmt: skip
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", help="auto, float32, float16, bfloat16, int8, int4")
    add("--host", default="127.0.0.1", help="where to listen; default: this machine only")
    add("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    add("--api-key", metavar="KEY", help="refuse clients that do not send this key")
    add("--n-blocks", type=int, default=1024, metavar="N", help="the cache; default: 1024")
    add("--block-size", type=int, default=16, metavar="N", help="tokens a block; default: 16")
    add("--max-seqs", type=int, default=16, metavar="N", help="answers at once; default: 16")
    add("--max-waiting", type=int, default=256, metavar="N", help="in the queue; default: 256")
    add(
        "--max-batch-tokens", type=int, default=512, metavar="N",
        help="tokens computed in one step; default: 512",
    )  # fmt: skip
    add("--kv-dtype", choices=("int8", "int4"), help="store keys and values in fewer bits")
    add("--drafter", choices=_DRAFTERS, help="speculate; student and medusa fit the default model")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each layer; default: 1")
    add("--log-requests", action="store_true", help="print a line for each request")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. ValueError for options that cannot be, before loading."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"serve needs {' and '.join(missing)}; install them with pip install 'minillm[serve]'."
        )
    _check(options)
    if options.tp == 1:
        return _serve(options)
    from minillm.parallel.collectives import check_world_size, inside_torchrun
    from minillm.parallel.ranks import run_command

    if not inside_torchrun():
        _check_ranks(options)
        run_command(options.tp, "minillm", *options.arguments)
        return 0
    check_world_size("--tp", options.tp)
    return _serve(options) if os.environ["RANK"] == "0" else _follow(options)


def _serve(options: argparse.Namespace) -> int:
    from minillm.serving.engine_thread import EngineThread
    from minillm.serving.graceful import Server
    from minillm.serving.http_server import Endpoints

    # What ranks say on standard error is kept for torchrun's report.
    logging.basicConfig(
        format="%(asctime)s %(message)s", stream=sys.stderr if options.tp == 1 else sys.stdout
    )
    if options.log_requests:
        logging.getLogger("minillm.serving.requests").setLevel(logging.INFO)
    with _listening(options.host, options.port) as sock:
        thread = EngineThread(lambda: built(options))
        thread.start()
        try:
            host, port = sock.getsockname()[:2]
            name = thread.engine.model.config.name
            print(f"{name} answers at http://{host}:{port}/v1; Ctrl-C ends it.", flush=True)
            Server(Endpoints(thread, api_key=options.api_key)).run(sockets=[sock])
        finally:
            thread.close()
    return 0


def _follow(options: argparse.Namespace) -> int:
    """A rank that is not the first: it has no requests, and ends when rank 0 does."""
    # While it loads it ends at once: Python's own handler would wait for a collective.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with built(options):
        return 0


def _check(options: argparse.Namespace) -> None:
    names = ("n_blocks", "block_size", "max_seqs", "max_waiting", "max_batch_tokens", "tp")
    for name in names:
        check_whole(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.max_batch_tokens < options.max_seqs:
        raise ValueError(
            f"--max-batch-tokens is {options.max_batch_tokens}, fewer than the {options.max_seqs} "
            "answers of --max-seqs; each needs a token in a step, so give at least as many."
        )
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port is {options.port}; give a number from 0 to 65535.")
    if options.api_key is not None and not (options.api_key and options.api_key.isascii()):
        raise ValueError("--api-key is empty or not ASCII; give letters, digits and signs.")


def _check_ranks(options: argparse.Namespace) -> None:
    """ValueError, before any rank starts, for options that do not fit --tp."""
    from minillm.parallel.loading import check_split

    if options.drafter in ("student", "medusa"):
        raise ValueError(
            f"--drafter {options.drafter} multiplies with the model's own head, which --tp splits; "
            "use --drafter ngram."
        )
    if options.device not in ("auto", "cpu"):
        raise ValueError(
            f"--device is {options.device}, but with --tp each rank takes a GPU of its own; give "
            "auto or cpu."
        )
    check_split(options.model, options.dtype, options.tp)
    _listening(options.host, options.port).close()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that holds the address, so that a wrong one is told before the model is loaded."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ValueError(
            f"Nothing can listen at {host}, port {port} ({error.strerror}); give another --host or "
            "--port."
        ) from error


@contextmanager
def built(options: argparse.Namespace) -> "Iterator[tuple[Engine, Tokenizer]]":
    """The engine and tokenizer that the options describe; of ranks, only the first gets one."""
    from minillm.serving.engine import Engine
    from minillm.serving.engine_config import EngineConfig

    model, tokenizer = _loaded(options)
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer.json; a server needs one.")
    drafter = _drafter(options.drafter, model)
    graphs = model.device.type == "cuda" and options.tp == 1
    config = EngineConfig(
        n_blocks=options.n_blocks, block_size=options.block_size, max_seqs=options.max_seqs,
        max_batch_tokens=options.max_batch_tokens, max_waiting=options.max_waiting,
        kv_dtype=options.kv_dtype, drafter=drafter,
        cuda_graphs=graphs and not (drafter is not None and drafter.uses_states),
    )  # fmt: skip
    if options.tp == 1:
        yield Engine(_prepacked(model), config), tokenizer
        return
    from minillm.parallel.serving import shared_engine

    if os.environ["RANK"] != "0":  # from here on it listens to rank 0 alone
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with shared_engine(model, config) or nullcontext() as engine:
        yield engine, tokenizer


def _loaded(options: argparse.Namespace) -> "tuple[Decoder, Tokenizer | None]":
    if options.tp == 1:
        from minillm.weights.loading import load as loaded
    else:
        from minillm.parallel.loading import load_tensor_parallel as loaded
    return loaded(options.model, device=options.device, dtype=options.dtype)


def _prepacked(model: "Decoder") -> "Decoder":
    """The model with its matrices in the layout of the CPU's products, where there is one."""
    from minillm.prepacked import prepack

    try:
        return prepack(model)
    except ValueError:  # a GPU, other dtypes, a CPU without the instructions
        return model


def _drafter(name: str | None, model: "Decoder") -> "Drafter | None":
    from minillm.speculation.drafters import ModelDrafter, NgramDrafter

    if name is None:
        return None
    if name == "ngram":
        return NgramDrafter()
    if name == "student":
        from minillm.distillation.student import load_student

        return ModelDrafter(_prepacked(load_student(model)))
    from minillm.speculation.medusa import MedusaDrafter
    from minillm.speculation.medusa_heads import load_heads

    return MedusaDrafter(load_heads())
