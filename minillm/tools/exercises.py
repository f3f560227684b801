"""Checks that an exercise is the learner's own work.

A check compares what a learner wrote with what the package computes, so a solution that calls the
package's own function would always pass. `own_work` reads the names that a function uses.
"""

from collections.abc import Callable, Iterator
from types import CodeType


def own_work(solution: Callable, *forbidden: str) -> None:
    """Raise AssertionError if a function or a class uses one of the `forbidden` names.

    Nested functions are read too, whether they are called or not. A name counts as a variable, an
    import, or an attribute. This keeps honest learners honest; it is not a sandbox.
    """
    used: set[str] = set()
    for code in _codes(solution):
        used.update(code.co_names)
    for name in forbidden:
        assert name not in used, (
            f"{solution.__name__} uses {name}, which does the exercise for you; write it yourself."
        )


def _codes(thing: object) -> Iterator[CodeType]:
    """The code of a function, of a class's methods, and of everything defined inside them."""
    if isinstance(thing, type):
        for member in vars(thing).values():
            yield from _codes(member)
    elif isinstance(thing, CodeType):
        yield thing
        for constant in thing.co_consts:
            yield from _codes(constant)
    elif hasattr(thing, "__wrapped__") or hasattr(thing, "fn"):  # decorated; a Triton kernel
        yield from _codes(getattr(thing, "__wrapped__", None) or thing.fn)
    elif hasattr(thing, "__code__"):
        yield from _codes(thing.__code__)
