"""An exercise cut out of its notebook: the statements that its check needs, and no others.

Nothing is written twice: the check is the notebook's own cell, and what stands before it is found
backwards from the names that the check uses. A name is needed as it was last bound before it is
used; a name inside a function, as it was last bound before the check.
"""

import ast
import builtins
import json
import re
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from builder.plain import modules, plain_modules

HOLE = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION\n?", re.S | re.M)
HIDDEN = re.compile(r"^ *### (?:BEGIN|END) HIDDEN TESTS\n?", re.M)


@dataclass(frozen=True)
class Exercise:
    """One graded exercise. before: what is run first; output: what a right answer prints."""

    lesson: str
    name: str
    solution: str
    check: str
    before: str
    output: str

    @property
    def hole(self) -> str:
        """What the learner starts from."""
        return holed(self.solution)

    @property
    def in_page(self) -> bool:
        """Whether it runs where nothing but the standard library and the plain modules is."""
        return not self.needs

    @property
    def needs(self) -> set[str]:
        """The imports that no page has."""
        text = f"{self.before}\n{self.solution}\n{self.check}"
        return {name for name in _imported(ast.parse(text)) if not _plain(name)}


def holed(source: str) -> str:
    """A solution's cell with a hole in its place."""
    return HOLE.sub(r"\1# YOUR CODE HERE\n\1raise NotImplementedError\n", source).rstrip() + "\n"


def without_set_up(notebook: dict) -> dict:
    """A notebook without the cell that installs the package: a page has it."""
    kept = [c for c in notebook["cells"] if "set-up" not in c["metadata"].get("tags", [])]
    return {**notebook, "cells": kept}


def exercises(notebook: Path) -> list[Exercise]:
    """The graded exercises of a notebook, in their order."""
    cells = without_set_up(json.loads(notebook.read_text(encoding="utf-8")))["cells"]
    codes = [(i, cell) for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    found: list[Exercise] = []
    for at, cell in codes:
        about = cell["metadata"].get("nbgrader", {})
        if not about.get("solution"):
            continue
        written, name = "".join(cell["source"]), about["grade_id"]
        checks = _checks(codes, at)
        if not checks:
            continue
        first = checks[0][0]
        earlier = ["".join(c["source"]) for i, c in codes if i < first and i != at]
        check = "\n".join(without_marks("".join(c["source"])) for _, c in checks)
        before = sliced(earlier, f"{written}\n{check}")
        printed = "".join(_printed(c) for _, c in checks)
        found.append(Exercise(notebook.stem, name, written, check, before, printed))
    return found


def _checks(codes: list[tuple[int, dict]], at: int) -> list[tuple[int, dict]]:
    """The graded cells between the solution in cell `at` and the next one."""
    found = []
    for i, cell in codes:
        about = cell["metadata"].get("nbgrader", {})
        if i > at and about.get("solution"):
            break
        if i > at and about.get("grade"):
            found.append((i, cell))
    return found


def _printed(cell: dict) -> str:
    """What a cell has printed, without the line of a part that was kept in a file."""
    text = "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")
    return re.sub(r"^Kept in mine/.*\n", "", text, flags=re.M)


def without_marks(source: str) -> str:
    """A check without nbgrader's and nbval's marks, and without what keeps a part in a file."""
    lines = HIDDEN.sub("", source).splitlines()
    marks = ("# NBVAL_CHECK_OUTPUT", "keep(")
    kept = [line for line in lines if not line.startswith(marks)]
    return "\n".join(kept) + "\n"


@dataclass(frozen=True, eq=False)
class _Statement:
    text: str
    binds: frozenset[str]
    now: frozenset[str]  # names that it reads when it runs, before it binds them
    late: frozenset[str]  # names that functions in it use when they are called
    sure: bool  # whether it binds anew whatever it binds
    mends: frozenset[str]  # names whose values it changes


def sliced(cells: list[str], last: str) -> str:
    """The statements of `cells` that `last` needs, in their order."""
    statements = [s for cell in cells for s in _statements(cell)]
    end = list(_statements(last))
    late: set[str] = set()
    # A module's functions, such as plots.save, do not change the module.
    imported = [s for s in statements if s.text.startswith(("from ", "import "))]
    modules = {name for statement in imported for name in statement.binds}
    while True:
        needed, kept, more = set(late), [], set(late)
        for statement in reversed(statements + end):
            if statement not in end:
                if not (statement.binds | statement.mends - modules) & needed:
                    continue
                kept.append(statement)
            if statement.sure:
                needed -= statement.binds
            needed |= statement.now
            more |= statement.late
        if more == late:
            return "".join(f"{s.text}\n" for s in reversed(kept))
        late = more


@cache  # every exercise of a notebook asks for all cells before it
def _statements(cell: str) -> tuple[_Statement, ...]:
    """The statements of a cell; imports name by name. Lines for IPython are none."""
    return tuple(_read_statements(cell))


def _read_statements(cell: str) -> Iterator[_Statement]:
    lines = [line for line in cell.splitlines() if not line.startswith(("%", "!"))]
    for node in ast.parse("\n".join(lines)).body:
        text = _segment(lines, node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.decorator_list:
            text = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                said = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                none = frozenset()
                whole = f"{start}import {said}"
                yield _Statement(whole, frozenset({bound}), none, none, True, none)
            continue
        for part in _split(node):
            written = text if part is node else ast.unparse(part)
            now, late = _uses(part, written)
            binds, sure, mends = _bound(part)
            yield _Statement(written, binds, now, late - binds, sure, mends)


def _segment(lines: list[str], node: ast.stmt) -> str:
    """As `ast.get_source_segment`, which takes the whole source apart for every node."""
    own = [line.encode() for line in lines[node.lineno - 1 : node.end_lineno]]  # offsets: of bytes
    own[-1] = own[-1][: node.end_col_offset]
    own[0] = own[0][node.col_offset :]
    return b"\n".join(own).decode()


def _split(node: ast.stmt) -> list[ast.stmt]:
    """`a, b = 1, 2` as two statements, where no value uses a name that is bound in it."""
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
        return [node]
    names, values = node.targets[0], node.value
    if not (isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple)):
        return [node]
    used = {n.id for n in ast.walk(values) if isinstance(n, ast.Name)}
    bound = {n.id for n in ast.walk(names) if isinstance(n, ast.Name)}
    if len(names.elts) != len(values.elts) or used & bound:
        return [node]
    return [
        ast.fix_missing_locations(ast.Assign([name], value, lineno=0))
        for name, value in zip(names.elts, values.elts, strict=True)
    ]


def _bound(node: ast.stmt) -> tuple[frozenset[str], bool, frozenset[str]]:
    """(names that it binds, whether it is sure to, names whose values it changes)."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return frozenset({node.name}), True, frozenset()
    names, mends = set(), set()
    for inner in _own(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
        elif isinstance(inner, (ast.Attribute, ast.Subscript)) and isinstance(inner.ctx, ast.Store):
            mends.add(_root(inner))
        elif isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            mends.add(_root(inner.value.func))  # a call for its effect: rows.append(1)
    sure = isinstance(node, (ast.Assign, ast.AnnAssign))
    return frozenset(names), sure, frozenset(mends - {""})


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, but not in its functions, classes and comprehensions."""
    yield node
    inner = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
             ast.GeneratorExp)  # fmt: skip
    for child in ast.iter_child_nodes(node):
        if isinstance(child, inner):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                yield child
        else:
            yield from _own(child)


def _root(node: ast.AST) -> str:
    """`a` of a.b[0].c; nothing for other values."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _uses(node: ast.stmt, text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Global names that a statement uses: (when it runs, when its functions are called)."""
    now: set[str] = set()
    _read(node, set(), now)
    late: set[str] = set()

    def walk(scope: symtable.SymbolTable) -> None:
        for child in scope.get_children():
            late.update(s.get_name() for s in child.get_symbols() if s.is_global())
            walk(child)

    walk(symtable.symtable(text, "<cell>", "exec"))
    known = set(dir(builtins))
    return frozenset(now - known), frozenset(late - known - now)


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _read(node: ast.AST, bound: set[str], read: set[str]) -> None:
    """Add to `read` the names that running a node reads before it binds them itself."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif node.id not in bound:
            read.add(node.id)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read |= {node.target.id} - bound
        _read_all([node.value, *getattr(node, "targets", [getattr(node, "target", None)])],
                  bound, read)  # fmt: skip
    elif isinstance(node, (ast.For, ast.comprehension)):
        parts = [node.body, node.orelse] if isinstance(node, ast.For) else [node.ifs]
        _read_all([node.iter, node.target, *(part for each in parts for part in each)], bound, read)
    elif isinstance(node, COMPREHENSIONS):
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        _read_all([*node.generators, *values], set(bound), read)  # its names are its own
    elif isinstance(node, ast.Lambda):
        _read_all([*node.args.defaults], bound, read)
    elif isinstance(node, ast.FunctionDef):
        _read_all([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults], bound, read)
        bound.add(node.name)
    elif isinstance(node, ast.ClassDef):
        _read_all([*node.decorator_list, *node.bases], bound, read)
        _read_all(node.body, set(bound), read)
        bound.add(node.name)
    else:
        _read_all(list(ast.iter_child_nodes(node)), bound, read)


def _read_all(nodes: list[ast.AST | None], bound: set[str], read: set[str]) -> None:
    for node in nodes:
        if node is not None:
            _read(node, bound, read)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _plain(name: str) -> bool:
    """Whether a full name, of a module or in one, is there in a page."""
    top, _, rest = name.partition(".")
    if top != "minillm":
        return top in sys.stdlib_module_names
    plain, every = plain_modules(), modules()
    if name in every:
        return name in plain
    home = name.rpartition(".")[0]
    if home == "minillm":  # the package's own names, each of which has a home
        home = f"minillm.{_homes().get(rest, rest)}"
    return home in plain


@cache
def _homes() -> dict[str, str]:
    """Names of the package itself -> the modules that they come from, read from its `__init__`."""
    tree = ast.parse(modules()["minillm"].read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            return ast.literal_eval(node.value) | {"plots": "tools.plots"}
    return {}
