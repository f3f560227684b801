"""Chat templates: Jinja programs that come with a checkpoint, run where they can do no harm.

Jinja's sandbox shields the interpreter from a template, but does not stop one that runs forever or
fills the memory. So a template is rendered in its own process, with limits on time and memory: that
costs a fraction of a second, once for each turn of a conversation.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from minillm.tools.checks import brief
from minillm.tools.folders import PACKAGE

SECONDS, MEGABYTES, CHARACTERS = 10, 1024, 10_000_000
"""Limits on a template's time and memory, and on the length of its text.

They include the start of the interpreter and its own memory.
"""


def render(template: str, messages: Sequence[dict[str, str]], tokens: dict[str, str]) -> str:
    """The conversation as text; ValueError for a template that fails or exceeds a limit.

    tokens: texts of the control tokens that the template may name, such as "bos_token".
    """
    request = {"template": template, "messages": list(messages), "tokens": tokens}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "minillm.tools.chat_template"],
            # Python looks for modules in the working folder first: it must not be a checkpoint's.
            cwd=PACKAGE.parent,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"The checkpoint's chat template ran for more than {SECONDS} seconds; use another "
            "checkpoint, or encode the text yourself."
        ) from error
    if done.returncode or not done.stdout:
        raise ValueError(
            f"The checkpoint's chat template took more than {MEGABYTES} MB of memory, or its "
            "process was ended; use another checkpoint, or encode the text yourself."
        )
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["text"]


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


def _reply(request: dict[str, Any]) -> dict[str, str]:
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
    return {"error": f"The checkpoint's chat template failed: {reason}."}


if __name__ == "__main__":
    sys.stdin.reconfigure(encoding="utf-8")
    sys.stdout.reconfigure(encoding="utf-8")
    _limit_memory()
    print(json.dumps(_reply(json.load(sys.stdin))))
