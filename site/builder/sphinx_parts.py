"""What Sphinx is taught for this site: formulas made at build time, names linked to reference."""

import ast
import json
import re
import subprocess
from html import unescape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from builder.paths import NODE, SITE
from builder.reference import objects, read_modules

log = logging.getLogger(__name__)


# Formulas


class Katex:
    """A process that turns TeX into HTML."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._known: dict[tuple[str, bool], str] = {}

    def html(self, tex: str, alone: bool, where: nodes.Node) -> str:
        """The formula's HTML; a warning for TeX that KaTeX refuses."""
        if (tex, alone) not in self._known:
            answer = self._ask([tex, alone])
            if "error" in answer:
                log.warning("%s: %s", tex, answer["error"], location=where)
            self._known[tex, alone] = answer.get("html", tex)
        return self._known[tex, alone]

    def _ask(self, question: list[Any]) -> dict[str, str]:
        if self._process is None:
            script, modules = SITE / "builder" / "katex.mjs", NODE / "node_modules" / "here.js"
            self._process = subprocess.Popen(
                ["node", script, modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self, app: Sphinx, error: Exception | None) -> None:
        """The process ends with the build."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None


katex = Katex()


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(katex.html(node.astext(), False, node))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    html = katex.html(node.astext(), True, node)
    writer.body.append(f'<div class="katex-block">{html}</div>')
    raise nodes.SkipNode


# Links from names to where they are described

_CODE = re.compile(
    r'<a [^>]*>.*?</a>|<code class="[^"]*literal[^"]*"><span class="pre">([^<]+)</span></code>',
    re.S,
)
_HIGHLIGHTED = re.compile(r'(<div class="highlight-(?:ipython3|python)[^>]*>.*?</pre>)', re.S)
_NAME = re.compile(
    r'(?<!<span class="o">\.</span>)<span class="(?:n|nn|nc|nf)">([\w.]+)</span>'
    r'((?:<span class="o">\.</span><span class="n">\w+</span>)?)'
)


class Links:
    """Names in a page, as links to the reference."""

    def __init__(self) -> None:
        self.places = objects(read_modules())

    def known(self, page: str, source: str) -> dict[str, str]:
        """What names imported from the package mean in a page: alias -> full name."""
        found = {}
        for line in re.findall(r"^ *(from minillm[^\n(]*|import minillm[^\n]*)", source, re.M):
            try:
                (node,) = ast.parse(line.strip().replace("\\n", "").rstrip('",')).body
            except SyntaxError:
                continue
            for alias in node.names:
                full = (
                    f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else "minillm"
                )
                found[alias.asname or alias.name.partition(".")[0]] = full
        return found

    def place(self, name: str, known: dict[str, str]) -> str | None:
        """Where a dotted name, or a path of a module, is described."""
        name = unescape(name).removesuffix("()")
        if name.endswith(".py"):
            name = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        head, _, rest = name.partition(".")
        tries = [name, f"minillm.{name}" if rest or name in MODULE_WORDS else ""]
        if head in known:
            tries.insert(0, f"{known[head]}.{rest}" if rest else known[head])
        return next((self.places[t] for t in tries if t in self.places), None)

    def linked(self, body: str, page: str, source: str) -> str:
        """A page's HTML with links."""
        up, known = "../" * page.count("/"), self.known(page, source)

        def text(match: re.Match[str]) -> str:
            whole = match[0]
            if not match[1]:
                return whole  # a link already
            place = self.place(match[1], known)
            if not place or place.partition("#")[0].removesuffix(".html") == page:
                return whole
            inner = whole.replace(">" + match[1], f'><a href="{up}{place}">{match[1]}</a>', 1)
            return inner

        def code(match: re.Match[str]) -> str:
            name, rest = match[1], match[2]
            if rest:
                full = f"{name}.{re.sub('<[^>]*>', '', rest)[1:]}"
                place = self.place(full, known) if name in known or name == "minillm" else None
                if place:
                    return f'<a href="{up}{place}">{match[0]}</a>'
            alone = name in known or name.startswith("minillm.")
            place = self.place(name, known) if alone else None
            if not place:
                return match[0]
            first = match[0][: len(match[0]) - len(rest)]
            return f'<a href="{up}{place}">{first}</a>{rest}'

        body = _CODE.sub(text, body)
        return _HIGHLIGHTED.sub(lambda block: _NAME.sub(code, block[1]), body)


MODULE_WORDS = frozenset({"costs", "metrics"})
"""Modules that the lessons' text names without the package's name."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    links = Links()

    def link(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
        if not context.get("body") or page.startswith(("genindex", "py-modindex", "search")):
            return
        path = app.env.doc2path(page) if page in app.env.all_docs else None
        source = path.read_text(encoding="utf-8") if path else ""
        if path and path.suffix == ".ipynb":
            cells = json.loads(source)["cells"]
            source = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        elif not page.startswith("reference/"):
            source = ""
        context["body"] = links.linked(context["body"], page, source)

    app.add_html_math_renderer("katex", (_inline, None), (_block, None))
    app.connect("html-page-context", link)
    app.connect("build-finished", katex.end)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
