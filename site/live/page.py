"""The live elements by name, as HTML for a page and as answers to its questions."""

import io
import json
import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from html import escape
from types import ModuleType
from typing import Any

from live import (
    accept,
    by_hand,
    calculator,
    cluster,
    headline,
    load,
    memory,
    price,
    scheduler,
    speedup,
)
from live.controls import Control

WIDE, NARROW = 760, 350
"""Widths of the two first pictures in pixels, for a screen and for a phone."""


@dataclass(frozen=True)
class Element:
    """A live element. button: what starts it, where each change of a control would be too much."""

    controls: tuple[Control, ...]
    draw: Callable[..., str | Iterator[str]]
    code: tuple[str, ...]  # modules whose code answers
    button: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        return {control.name: control.value for control in self.controls}


def _element(module: ModuleType, *code: str, button: str = "") -> Element:
    return Element(module.CONTROLS, module.draw, code, button)


ELEMENTS = {
    "headline": _element(headline, "card", "hardware"),
    "calculator": _element(calculator, "card", "costs", "hardware"),
    "scheduler": _element(scheduler, "serving.scheduler", "blocks", "serving.virtual_time"),
    "load": _element(load, "serving.virtual_time", "serving.workload", "serving.metrics",
                     button="send the load"),
    "memory": _element(memory, "fragmentation", "pieces", "blocks"),
    "by_hand": _element(by_hand, "blocks"),
    "accept": _element(accept, "speculation.formulas"),
    "speedup": _element(speedup, "speculation.formulas"),
    "cluster": _element(cluster, "parallel.step_time", "parallel.plan"),
    "price": _element(price, "card", "hardware"),
}  # fmt: skip


def answers(name: str, values: dict[str, Any], width: int) -> Iterator[str]:
    """Pictures for these values of an element's controls, a better one each time.

    What the package refuses becomes its sentence.
    """
    element = ELEMENTS[name]
    try:
        drawn = element.draw(**{**element.defaults, **values}, width=width)
        yield from (drawn,) if isinstance(drawn, str) else drawn
    except ValueError as error:
        yield f'<p class="refused">{escape(str(error))}</p>'


def answer(name: str, values: dict[str, Any], width: int) -> str:
    """The last of these pictures."""
    return list(answers(name, values, width))[-1]


def placed(name: str) -> str:
    """The element as it stands in a page: controls, and the first picture in two widths."""
    element = ELEMENTS[name]
    controls = "".join(control.html() for control in element.controls)
    if element.button:
        controls += f'<button type="button" class="go">{element.button}</button>'
    pictures = "".join(
        f'<div class="{kind}">{answer(name, {}, width)}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return (
        f'<div class="live" data-element="{name}"><form class="controls">{controls}</form>'
        f'<div class="picture">{pictures}</div><p class="state" aria-live="polite"></p></div>'
    )


def run_exercise(before: str, learner: str, check: str) -> str:
    """Run what an exercise needs, the learner's text and the check; JSON with what it printed.

    passed: whether nothing was raised. error: the last line of what was, and where the learner's
    own text raised it.
    """
    scope: dict[str, Any] = {"__name__": "__exercise__", "keep": lambda *parts: None}
    printed, error = io.StringIO(), ""
    try:
        for name, source in (("before", before), ("your code", learner), ("check", check)):
            file = f"<{name}>"
            # So that inspect and tracebacks find the lines.
            linecache.cache[file] = (len(source), None, source.splitlines(True), file)
            with redirect_stdout(printed if name == "check" else io.StringIO()):
                exec(compile(source, file, "exec"), scope)
    except (Exception, SystemExit) as raised:
        error = "".join(traceback.format_exception_only(raised)).strip()
        lines = [f.lineno for f in traceback.extract_tb(raised.__traceback__)
                 if f.filename == "<your code>"]  # fmt: skip
        if lines and not isinstance(raised, SyntaxError):
            error = f"line {lines[-1]} of your code: {error}"
    return json.dumps({"passed": not error, "printed": printed.getvalue(), "error": error})
