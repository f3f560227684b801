"""Triton's interpreter, twice as fast."""

import functools
from types import SimpleNamespace
from typing import Any

from tiers import HAS_TRITON, INTERPRETED


@functools.cache
def patch_once_a_launch() -> None:
    """Let the interpreter, if it is on, put its own functions in place once a launch.

    It would do so again in every call of a function inside of a kernel, and search all of
    triton.language for what to replace: half of the time of a test. What is computed stays the
    same.
    """
    if not (INTERPRETED and HAS_TRITON):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(function: interpreter.InterpretedFunction, *arguments: Any, **keywords: Any) -> Any:
        return function.rewrite()(*arguments, **keywords)

    interpreter._patch_lang = lambda _: patch(everything)
    interpreter.InterpretedFunction.__call__ = call
