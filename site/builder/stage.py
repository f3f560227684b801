"""Lay out what Sphinx reads, in build/site/source, and let it make the site in build/site/html.

python -m builder.stage, in the environment of site/requirements.txt; `make site` does it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from live.page import ELEMENTS, placed

from builder import lessons as lesson_pages
from builder.pack import pack_modules, pack_python
from builder.paths import (
    BUILD,
    FIGURES,
    HTML,
    NODE,
    NOTEBOOKS,
    ROOT,
    SITE,
    SOURCE,
    further,
    lessons,
)
from builder.reference import index, page, read_modules
from builder.slices import exercises
from builder.thumbnails import thumbnail

PLACE = re.compile(r"<!-- (\w+)(?:: *(\w+))? -->")


def stage() -> None:
    """Write every page that the site has."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(SITE / "pages", SOURCE)
    shutil.copy2(SITE / "conf.py", SOURCE / "conf.py")
    _static(SOURCE / "_static")
    shown = _notebooks()
    for path in sorted(SOURCE.rglob("*.md")):
        _put(path, _filled(path.read_text(encoding="utf-8")))
    for name, source, links_from in (
        ("readme.md", ROOT / "README.md", ROOT),
        ("teachers.md", NOTEBOOKS / "README.md", NOTEBOOKS),
        ("results.md", FIGURES / "RESULTS.md", FIGURES),
    ):
        text = source.read_text(encoding="utf-8")
        shown |= lesson_pages.figures_of(text)
        _put(SOURCE / name, _at_the_top(lesson_pages.relinked(text, links_from), links_from))
    modules = read_modules()
    for module in modules:
        _put(SOURCE / "reference" / f"{module.name}.md", page(module))
    _put(SOURCE / "reference" / "index.md", index(modules))
    for figure in shown:
        (SOURCE / "figures").mkdir(exist_ok=True)
        shutil.copy2(figure, SOURCE / "figures" / figure.name)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _at_the_top(text: str, home: Path) -> str:
    """Links of a text that moves from `home` to the top of the site."""
    if home == ROOT:
        return text
    text = re.sub(r"\]\(\.\./", "](", text)
    folder = home.relative_to(ROOT)
    return re.sub(r"\]\((?=[\w/]+\.(?:ipynb|png|gif))(?!figures/|notebooks/)", f"]({folder}/", text)


def _static(target: Path) -> None:
    """Scripts, styles, Python for the browser, formulas' letters."""
    shutil.copytree(SITE / "static", target)
    cache = BUILD / "pyodide"  # compiling its library takes seconds, so it is kept
    pack_python(cache)
    shutil.copytree(cache, target / "pyodide")
    pack_modules(target / "minillm.zip")
    katex = NODE / "node_modules" / "katex" / "dist"
    (target / "katex" / "fonts").mkdir(parents=True)
    shutil.copy2(katex / "katex.min.css", target / "katex")
    for font in katex.glob("fonts/*.woff2"):
        shutil.copy2(font, target / "katex" / "fonts")


def _notebooks() -> set[Path]:
    """The lessons' pages and what their exercises run; returns the figures that they show."""
    shown: set[Path] = set()
    for notebook in (*lessons(), *further()):
        text, runs = lesson_pages.page(notebook)
        shown |= lesson_pages.figures_of(text)
        _put(SOURCE / notebook.relative_to(ROOT), text)
        if runs:
            _put(SOURCE / "_static" / "exercises" / f"{notebook.stem}.json", json.dumps(runs))
    return shown


# Pages with places to fill: <!-- live: NAME -->, <!-- code: NAME -->, <!-- cards -->, …


def _filled(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        what, name = match.groups()
        if what == "live":
            return f"```{{raw}} html\n{placed(name)}\n```"
        if what == "code":
            links = ", ".join(
                f"[`minillm.{module}`](../reference/minillm.{module}.md)"
                for module in ELEMENTS[name].code
            )
            return f"The code that answers: {links}."
        return {"cards": _cards, "lessons": _lesson_list, "further": _further_list}[what]()

    return PLACE.sub(fill, text)


def _cards() -> str:
    """A card for each lesson."""
    cards = []
    for notebook in lessons():
        number, _, name = lesson_pages.title(notebook).partition(" · ")
        here = sum(exercise.in_page for exercise in exercises(notebook))
        said = f"{here} exercise{'s' * (here > 1)} in the page" if here else ""
        cards.append(
            f'<a href="notebooks/{notebook.stem}.html">{thumbnail(number)}<span class="number">'
            f'{number}</span><b>{name}</b><span class="question">'
            f'{lesson_pages.question(notebook)}</span><span class="exercises">{said}</span></a>'
        )
    return f'```{{raw}} html\n<div class="cards">{"".join(cards)}</div>\n```'


def _lesson_list() -> str:
    return "\n".join(f"notebooks/{notebook.stem}" for notebook in lessons())


def _further_list() -> str:
    entries = "\n".join(f"notebooks/further/{notebook.stem}" for notebook in further())
    return f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```" if entries else ""


def build() -> int:
    """Sphinx's exit code; every warning is an error."""
    doctrees = BUILD / "doctrees"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html",
               "-d", doctrees, SOURCE, HTML]  # fmt: skip
    return subprocess.run(command, cwd=SITE).returncode


if __name__ == "__main__":
    stage()
    sys.exit(build())
