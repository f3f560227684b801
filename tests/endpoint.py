"""A server of a tiny model, in this process, for the tests of the endpoint."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from models import lively

from minillm import Decoder, Engine, EngineConfig, Tokenizer
from minillm.serving.engine_thread import EngineThread
from minillm.serving.graceful import Server
from minillm.serving.http_server import Endpoints
from minillm.vocabulary import byte_alphabet

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one that ends an answer."""
    return Tokenizer(
        byte_alphabet(), [], special={"<|end|>": 256}, pattern=r"[\s\S]", stop_ids=[256],
        chat_template=TEMPLATE,
    )  # fmt: skip


def small_model() -> Decoder:
    """A model for that tokenizer."""
    return lively(3, vocab_size=257)


@dataclass
class Running:
    """A server that answers at `url`, and the engine's thread behind it."""

    url: str
    thread: EngineThread


@contextmanager
def serving(
    model: Decoder | None = None, *, api_key: str | None = None, **config: object
) -> Iterator[Running]:
    """A server in a thread of its own, until the block ends. config: of the engine."""

    @contextmanager
    def build() -> Iterator[tuple[Engine, Tokenizer]]:
        options = {"n_blocks": 256, "block_size": 4, "max_seqs": 8} | config
        yield Engine(small_model() if model is None else model, EngineConfig(**options)), tokenizer

    tokenizer = byte_tokenizer()
    thread = EngineThread(build)
    thread.start()
    server = Server(Endpoints(thread, api_key=api_key))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        loop = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        loop.start()
        try:
            yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", thread)
        finally:
            server.should_exit = True
            loop.join()
            thread.close()
