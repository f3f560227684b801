"""Functions of a notebook as a program that runs alone.

A function needs more than its own lines: imports, constants, helpers and classes of the cells
before. `standalone` follows the global names that the lines read, and writes down what they stand
for: an import, a definition, or numbers and texts.
Not here: what has no such text, a loaded model for example; that raises NotStandalone.
"""

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

_NBGRADER = re.compile(r"^[ \t]*### (BEGIN|END) SOLUTION$\n?", re.MULTILINE)


class NotStandalone(ValueError):
    """Something that is used cannot be written down."""


def standalone(definitions: tuple[Any, ...]) -> str:
    """The text of a module that defines these functions and classes, of one notebook or module.

    Raises NotStandalone for a global name whose value is neither imported, nor defined there, nor
    made of numbers and texts.
    """
    program = _Program(_home(definitions[0]))
    for definition in definitions:
        program.add(definition)
    imports = "\n".join(sorted(program.imports))
    return "\n\n\n".join(filter(None, (imports, *program.texts))) + "\n"


class _Program:
    def __init__(self, home: str):
        self.home, self.names = home, vars(sys.modules[home])
        self.imports: set[str] = set()
        self.texts: list[str] = []  # in the order in which they can be run
        self.done: set[str] = set()

    def add(self, definition: Any) -> None:
        """A function, class or Triton kernel, after all that it uses."""
        definition = _plain(definition)
        if definition.__name__ in self.done:
            return
        self.done.add(definition.__name__)
        text = _NBGRADER.sub("", textwrap.dedent(_source(definition)).strip())
        for name in _globals_read(symtable.symtable(text, "<source>", "exec")):
            if name in self.names and name not in self.done:
                self._value(name, self.names[name], definition.__name__)
        self.texts.append(text)

    def _value(self, name: str, value: Any, user: str) -> None:
        if isinstance(value, ModuleType):
            self.imports.add(_import("import", value.__name__, name))
        elif getattr(_plain(value), "__module__", None) == self.home and _defines(value, name):
            self.add(value)
        elif _importable(value):
            self.imports.add(_import(f"from {value.__module__} import", value.__qualname__, name))
        else:
            self._constant(name, value, user)

    def _constant(self, name: str, value: Any, user: str) -> None:
        """`name = …` for numbers, texts, containers of them, and dataclasses made of them."""
        try:
            text = self._literal(value)
        except (ValueError, SyntaxError):
            raise NotStandalone(
                f"{user} uses {name}, a {type(value).__name__} of the notebook that cannot be "
                "written down; give it to the function as an argument, or make it inside."
            ) from None
        self.done.add(name)
        self.texts.append(f"{name} = {text}")

    def _literal(self, value: Any) -> str:
        kind = type(value)
        if is_dataclass(value) and _importable(kind):
            self.imports.add(f"from {kind.__module__} import {kind.__qualname__}")
            given = (field.name for field in fields(value) if field.init)
            inside = (f"{name}={self._literal(getattr(value, name))}" for name in given)
            return f"{kind.__qualname__}({', '.join(inside)})"
        if ast.literal_eval(repr(value)) != value:
            raise ValueError("other than its text")
        return repr(value)


def _source(definition: Any) -> str:
    """The text of a function or class. Before Python 3.13 inspect finds no class of a notebook."""
    try:
        return inspect.getsource(definition)
    except OSError:
        if not inspect.isclass(definition):
            raise
    for member in vars(definition).values():  # a method knows its cell
        code = getattr(getattr(member, "fget", member), "__code__", None)
        lines = linecache.getlines(code.co_filename) if code else []
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == definition.__name__:
                first = min(each.lineno for each in (node, *node.decorator_list))
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError(f"The text of {definition.__name__} is not to be found.")


def _plain(value: Any) -> Any:
    """The Python function inside a Triton kernel; anything else as it is."""
    inside = getattr(value, "fn", None)
    return inside if inspect.isfunction(inside) else value


def _home(definition: Any) -> str:
    return _plain(definition).__module__


def _defines(value: Any, name: str) -> bool:
    plain = _plain(value)
    return (inspect.isfunction(plain) or inspect.isclass(plain)) and plain.__name__ == name


def _importable(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    return module is not None and getattr(module, name, None) is value


def _import(how: str, what: str, name: str) -> str:
    return f"{how} {what}" if what == name else f"{how} {what} as {name}"


def _globals_read(scope: symtable.SymbolTable) -> Iterator[str]:
    """The global names that a text reads, in the functions and classes inside it as well."""
    for symbol in scope.get_symbols():
        outside = symbol.is_global() or scope.get_type() == "module"
        if outside and symbol.is_referenced() and not hasattr(builtins, symbol.get_name()):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _globals_read(inner)
