"""Reference pages for every module, from its source without importing it."""

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from builder.paths import PACKAGE, ROOT

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """A module: its full name, file, source and what it says of itself."""

    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def docstring(self) -> str:
        return inspect.cleandoc(ast.get_docstring(self.tree) or "")

    @property
    def definitions(self) -> list[Definition]:
        """Public functions and classes, in their order."""
        return [
            node for node in self.tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        ]  # fmt: skip


def read_modules() -> list[Module]:
    """Every module of the package, by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        source = path.read_text(encoding="utf-8")
        name = ".".join(parts).removesuffix(".__init__")
        found.append(Module(name, path, source, ast.parse(source)))
    return sorted(found, key=lambda module: module.name)


def objects(modules: list[Module]) -> dict[str, str]:
    """Full names -> where they are described: a page below reference/, and an anchor."""
    places = {}
    for module in modules:
        page = f"reference/{module.name}.html"
        places[module.name] = page
        for node in module.definitions:
            places[f"{module.name}.{node.name}"] = f"{page}#{module.name}.{node.name}"
            for method in _methods(node):
                full = f"{module.name}.{node.name}.{method.name}"
                places[full] = f"{page}#{full}"
    homes = homes_of(next(module.tree for module in modules if module.name == "minillm"))
    for name, home in homes.items():
        full = f"minillm.{home}.{name}"
        places[f"minillm.{name}"] = places.get(full, places.get(f"minillm.{home}", ""))
    return {name: place for name, place in places.items() if place}


def homes_of(tree: ast.Module) -> dict[str, str]:
    """The package's own names and the modules that define them."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            return ast.literal_eval(node.value)
    return {}


def _methods(node: Definition) -> list[ast.FunctionDef]:
    """Public methods that say something of themselves."""
    inner = node.body if isinstance(node, ast.ClassDef) else []
    return [
        each for each in inner if isinstance(each, ast.FunctionDef)
        and not each.name.startswith("_") and ast.get_docstring(each)
    ]  # fmt: skip


def page(module: Module) -> str:
    """The module's page in MyST: its docstring, each definition, and its source."""
    file = module.path.relative_to(ROOT)
    parts = [
        f"# {module.name.removeprefix('minillm.')}",
        f"```{{py:module}} {module.name}\n```",
        as_markdown(module.docstring),
    ]
    parts += [_described(node, "`" * 5) for node in module.definitions]
    lines = module.source.count("\n")
    parts.append(folded(_source(module), f"{file}, {lines} lines"))
    return "\n\n".join(parts) + "\n"


def _described(node: Definition, fence: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"{{py:class}} {node.name}({bases})" if bases else f"{{py:class}} {node.name}"
    else:
        head = f"{{py:function}} {node.name}{_signature(node)}"
    link = f'```{{raw}} html\n<a class="to-source" href="#source-{node.name}">source</a>\n```'
    inner = [link, as_markdown(ast.get_docstring(node) or "")]
    inner += [
        f"{fence[1:]}{{py:{_kind(m)}}} {m.name}{'' if _kind(m) == 'property' else _signature(m)}\n"
        f"{as_markdown(ast.get_docstring(m) or '')}\n{fence[1:]}"
        for m in _methods(node)
    ]
    body = "\n\n".join(inner)
    return f"{fence}{head}\n{body}\n{fence}"


def _kind(method: ast.FunctionDef) -> str:
    marks = {ast.unparse(mark) for mark in method.decorator_list}
    return "property" if marks & {"property", "cached_property"} else "method"


def _signature(node: ast.FunctionDef) -> str:
    """(…) -> …, without self."""
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({arguments}){returns}"


def _source(module: Module) -> str:
    """The whole source in parts, each of which a definition's link can point to."""
    lines, parts, start, anchor = module.source.splitlines(), [], 0, "source"
    for node in [*module.definitions, None]:
        first = len(lines) if node is None else _first_line(node)
        code = "\n".join(lines[start:first]).strip("\n")
        if code:
            mark = f'```{{raw}} html\n<span class="source-part" id="{anchor}"></span>\n```'
            parts.append(f"{mark}\n\n`````python\n{code}\n`````")
        start, anchor = first, f"source-{node.name}" if node else ""
    return "\n\n".join(parts)


def _first_line(node: Definition) -> int:
    """Where it begins, counted from 0, decorators included."""
    return min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) - 1


def folded(content: str, said: str, kind: str = "source") -> str:
    """Content that opens when its line is clicked."""
    begin = f'```{{raw}} html\n<details class="{kind}"><summary>{said}</summary>\n```'
    return f"{begin}\n\n{content}\n\n```{{raw}} html\n</details>\n```"


_SPECIAL = re.compile(r"([\\*_<>\[\]$#{}|~^])")


def as_markdown(docstring: str) -> str:
    """A docstring as Markdown: its signs are meant as they are, `names` are code.

    Indented lines, formulas and tables, stay as they are laid out.
    """
    lines, before = [], ""
    for line in inspect.cleandoc(docstring).splitlines():
        if line.startswith("    "):
            if before.strip() and not before.startswith("    "):
                lines.append("")  # a block needs an empty line before it
            lines.append(line)
        else:
            parts = re.split(r"(`[^`]+`)", line)
            lines.append("".join(
                part if i % 2 else _SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts)
            ))  # fmt: skip
        before = line
    return "\n".join(lines)


def index(modules: list[Module]) -> str:
    """The page that lists all modules, with the first line of what each says."""
    rows = "\n".join(
        f"- [`{module.name}`](minillm.md)" if module.name == "minillm"
        else f"- [`{module.name}`]({module.name}.md): {as_markdown(_first(module))}"
        for module in modules
    )  # fmt: skip
    toc = "\n".join(f"{m.name.removeprefix('minillm.')} <{m.name}>" for m in modules)
    return (
        "# Modules\n\nEvery module of the package, with the source of everything in it. "
        "The [README's list](../readme.md) says in which order to read them.\n\n"
        f"{rows}\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n"
    )


def _first(module: Module) -> str:
    return module.docstring.partition("\n")[0].rstrip(".")
