"""The modules of the package that need nothing but Python's standard library.

They are found by reading: a module is plain if all that it imports when it is imported itself is
the standard library and other plain modules of the package. `tests/test_site.py` imports each of
them where every other name is blocked.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from builder.paths import PACKAGE


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its full name, without the scripts."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if path.stem != "__main__":  # a script, not a module to import
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def _runs(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that an import runs: no bodies of functions, nothing that is for the types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _runs(node)


def imports(path: Path) -> set[str]:
    """Full names of what is imported along with a module; `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in _runs(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def plain_modules() -> tuple[str, ...]:
    """Their full names, sorted."""
    known = modules()
    needs = {name: imports(path) for name, path in known.items()}
    plain = set(known)
    while True:
        wrong = {name for name in plain if not all(_fine(n, plain, known) for n in needs[name])}
        # A module is imported after the packages that it lies in.
        gone = wrong | (set(known) - plain)
        wrong |= {name for name in plain if any(name.startswith(f"{g}.") for g in gone)}
        if not wrong:
            return tuple(sorted(plain))
        plain -= wrong


def _fine(name: str, plain: set[str], known: dict[str, Path]) -> bool:
    if name.partition(".")[0] != "minillm":
        return name.partition(".")[0] in sys.stdlib_module_names
    return name in plain if name in known else True  # a name in a module, which is listed as well
