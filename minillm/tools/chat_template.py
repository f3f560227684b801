"""Chat templates: Jinja programs that come with a checkpoint, run where they can do no harm.

Jinja's sandbox shields the interpreter from a template, but does not stop one that runs forever or
fills the memory. So a template is rendered in a process of its own, with limits on time and memory.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from minillm.tools.checks import brief
from minillm.tools.folders import PACKAGE

SECONDS, MEGABYTES, CHARACTERS = 10, 1024, 10_000_000
"""Limits on a template's time and memory, and on the length of its text.

They include the start of the interpreter, and its own memory.
"""


class Renderer:
    """One template, in a process that starts when it is first needed and then stays.

    Its start costs a fraction of a second, a conversation a few milliseconds. A process that failed
    or ran out of time is ended, and the next call starts another. Threads take turns.
    tokens: texts of the control tokens that the template may name, such as "bos_token".
    """

    def __init__(self, template: str, tokens: dict[str, str]):
        self._template, self._tokens = template, tokens
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as text; ValueError for a template that fails or exceeds a limit."""
        asked = {"template": self._template, "messages": list(messages), "tokens": self._tokens}
        with self._lock:
            try:
                reply = self._reply(json.dumps(asked))
            except BaseException:  # an interrupt, too: its answer must not be taken for the next
                self._end()
                raise
            if reply.get("failed"):
                self._end()
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process; it also ends with this object, and with this program."""
        with self._lock:
            self._end()

    def _reply(self, line: str) -> dict[str, Any]:
        process, late = self._running(), threading.Event()

        def stop() -> None:
            late.set()
            process.kill()  # so that readline returns

        timer = threading.Timer(SECONDS, stop)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise ValueError(
                f"The checkpoint's chat template ran for more than {SECONDS} seconds; use another "
                "checkpoint, or encode the text yourself."
            )
        if not reply:
            raise ValueError(
                f"The checkpoint's chat template took more than {MEGABYTES} MB of memory, or its "
                "process was ended; use another checkpoint, or encode the text yourself."
            )
        return json.loads(reply)

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "minillm.tools.chat_template"],
                # Python looks for modules in the working folder first: not a checkpoint's.
                cwd=PACKAGE.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            self._finalizer = weakref.finalize(self, _end_process, self._process)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _end_process(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not written yet has nowhere to go
            pipe.close()


def render(template: str, messages: Sequence[dict[str, str]], tokens: dict[str, str]) -> str:
    """One conversation, in a process that ends with it; see `Renderer`."""
    renderer = Renderer(template, tokens)
    try:
        return renderer.render(messages)
    finally:
        renderer.close()


def _render_here(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> str:
    """Run the template in the environment that transformers gives to templates.

    The same functions, filters and tags; what isn't set is undefined there, and so it is here.
    """
    environment = _environment()
    # tools and documents as in transformers: templates test whether they are none.
    return environment.from_string(template).render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens
    )


def _environment() -> Any:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} marks answers for training: here, just its body.

        A call block, as in transformers: names that are set inside are not known after it.
        """

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise _RefusedError(message)

    def strftime_now(format: str) -> str:  # templates may give it by this name
        return datetime.now().strftime(format)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # Jinja's own escapes the characters of HTML.
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.filters["tojson"] = tojson
    return environment


class _RefusedError(Exception):
    """A template called raise_exception."""


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit, (_, hardest) = MEGABYTES << 20, resource.getrlimit(resource.RLIMIT_AS)
    if hardest == resource.RLIM_INFINITY or limit < hardest:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        text = _render_here(**request)
        if len(text) <= CHARACTERS:
            return {"text": text}
        reason = f"its text is longer than {CHARACTERS} characters"
    except _RefusedError as error:
        return {"error": f"The chat template refuses these messages: {brief(str(error), 500)}."}
    except MemoryError:
        reason = f"it needs more than {MEGABYTES} MB of memory"
    except Exception as error:  # Jinja's own kinds, and whatever an expression raises
        reason = brief(f"{type(error).__name__}: {error}", 500)
    return {"error": f"The checkpoint's chat template failed: {reason}.", "failed": True}


if __name__ == "__main__":
    sys.stdin.reconfigure(encoding="utf-8")
    sys.stdout.reconfigure(encoding="utf-8")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asks
    _limit_memory()
    for line in sys.stdin:
        print(json.dumps(_reply(json.loads(line))), flush=True)
