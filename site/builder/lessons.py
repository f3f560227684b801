"""A lesson's notebook as a page: holes for its exercises, guesses before answers, folds."""

import ast
import json
import re
from html import escape
from pathlib import Path
from typing import Any

from live.page import ELEMENTS, placed

from builder.paths import FIGURES, NOTEBOOKS, ROOT
from builder.reference import folded
from builder.slices import Exercise, exercises, holed, without_set_up

Cell = dict[str, Any]
LIVE = re.compile(r"<!-- *live: *(\w+) *-->")
WIDE = 600  # pixels; wider figures scroll on a phone
IN_LESSON = {
    "01": ("calculator",), "02": ("calculator",), "06": ("memory", "by_hand"),
    "07": ("scheduler",), "08": ("load", "price"), "12": ("accept", "speedup"), "13": ("cluster",),
}  # fmt: skip
"""Live elements that stand in a lesson before its exercises, unless a comment places them."""
RIGHT_ANSWER = "Show the check, and what a right answer prints"


def page(notebook: Path) -> tuple[str, dict[str, dict[str, str]]]:
    """(the notebook that Sphinx reads, what the exercises in it run)."""
    whole = without_set_up(json.loads(notebook.read_text(encoding="utf-8")))
    known = {exercise.name: exercise for exercise in exercises(notebook)}
    cells: list[Cell] = []
    guesses: list[str] = []
    to_place = _to_place(notebook, whole["cells"])
    for cell in whole["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if to_place and (start := re.search(r"^## .*Exercise", source, re.M)):
                source = f"{source[: start.start()]}{to_place}\n\n{source[start.start() :]}"
                to_place = ""
            cells.append(_markdown(_text(source, notebook)))
            continue
        about = cell["metadata"].get("nbgrader", {})
        name = about.get("grade_id", "")
        if about.get("solution"):
            cells += _exercise(source, known.get(name), name, notebook)
        elif guess := _guess(source):
            guesses += guess[0]
            cells.append(_markdown(_raw(guess[1])))
        else:
            cells.append(_code(cell, source, bool(about.get("grade")), guesses))
    whole["cells"] = [{**cell, "id": f"cell-{i}"} for i, cell in enumerate(_merged(cells))]
    runs = {
        exercise.name: {"before": exercise.before, "check": exercise.check}
        for exercise in known.values() if exercise.in_page
    }  # fmt: skip
    return json.dumps(whole), runs


def _to_place(notebook: Path, cells: list[Cell]) -> str:
    """The live elements of a lesson that no comment in it places."""
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    placed_there = set(LIVE.findall(text))
    wanted = IN_LESSON.get(notebook.stem[:2], ()) if notebook.parent == NOTEBOOKS else ()
    marks = [f"<!-- live: {name} -->" for name in wanted if name not in placed_there]
    said = "**Try it here.** The package's own code answers, in this page, with nothing installed:"
    return "\n\n".join([said, *marks]) if marks else ""


def title(notebook: Path) -> str:
    """The lesson's title, "07 · Continuous batching"."""
    return _first(notebook, r"^# (.+)$")


def question(notebook: Path) -> str:
    """What the lesson asks: its first line in bold."""
    return _first(notebook, r"^\*\*(.+?)\*\*$")


def _first(notebook: Path, pattern: str) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells[:3] if c["cell_type"] == "markdown")
    found = re.search(pattern, text, re.M)
    return found[1] if found else notebook.stem


def _markdown(source: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _raw(html: str) -> str:
    return f"```{{raw}} html\n{html}\n```"


# Text


def relinked(text: str, home: Path) -> str:
    """Links to the repository's files as links to the site's pages.

    home: the folder that the text lies in. A module becomes its reference page; what the site
    does not have becomes plain text.
    """

    def link(match: re.Match[str]) -> str:
        said, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        file = (home / target.partition("#")[0]).resolve()
        try:
            place = file.relative_to(ROOT)
        except ValueError:
            return said
        up = "../" * len(home.relative_to(ROOT).parts)
        if place.parts[0] == "minillm" and place.suffix == ".py":
            name = ".".join(place.with_suffix("").parts).removesuffix(".__init__")
            return f"[{said}]({up}reference/{name}.md)"
        pages = {"README.md": "readme.md", "notebooks/README.md": "teachers.md",
                 "figures/RESULTS.md": "results.md"}  # fmt: skip
        if str(place) in pages:
            return f"[{said}]({up}{pages[str(place)]})"
        if place.suffix == ".ipynb" and file.exists():
            return f"[{said}]({target})"
        return match[0] if place.suffix in (".png", ".gif") and file.exists() else said

    return re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^()\s]+)\)", link, text)


def _text(source: str, notebook: Path) -> str:
    """A cell of text: links, and live elements where a comment names one."""

    def live(match: re.Match[str]) -> str:
        if match[1] not in ELEMENTS:
            raise ValueError(f"{notebook.name} asks for {match[1]!r}, which is no live element.")
        return f"\n\n{_raw(placed(match[1]))}\n\n"

    return relinked(LIVE.sub(live, source), notebook.parent)


# Code


def _code(cell: Cell, source: str, is_check: bool, guesses: list[str]) -> Cell:
    tags = [t for t in cell["metadata"].get("tags", []) if t.startswith(("hide", "remove"))]
    metadata: dict[str, Any] = {}
    if is_check:
        tags = ["hide-cell"]
        metadata["mystnb"] = {"code_prompt_show": RIGHT_ANSWER, "code_prompt_hide": RIGHT_ANSWER}
    elif cell["outputs"]:
        # What says how good a guess was is veiled until one is made.
        tags += [f"veil_{name}" for name in guesses if re.search(rf"\b{name}\b", source)]
    source = re.sub(r"^# NBVAL_CHECK_OUTPUT\n", "", source)
    source = re.sub(r"^ *### (?:BEGIN|END) HIDDEN TESTS\n?", "", source, flags=re.M)
    outputs = [_shown(output) for output in cell["outputs"]]
    image = _image(outputs)
    if image:
        metadata.setdefault("mystnb", {})["image"] = image
    return {**cell, "source": source, "outputs": outputs, "metadata": metadata | {"tags": tags}}


def _shown(output: Cell) -> Cell:
    """An output without its widget: no page has the kernel that would answer it."""
    output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    return output


def _image(outputs: list[Cell]) -> dict[str, str]:
    """What the page says of a cell's figure: its text, and whether it is a wide one."""
    for output in outputs:
        if "image/png" in output.get("data", {}):
            said = (output.get("metadata") or {}).get("image/png", {})
            text = " ".join(str(said.get("alt") or "A figure, drawn by the code above it").split())
            wide = {"classes": "figure-wide"} if int(said.get("width", WIDE + 1)) > WIDE else {}
            return {"alt": text, **wide}
    return {}


def _merged(cells: list[Cell]) -> list[Cell]:
    """Folded cells without output, one after another, fold as one."""
    kept: list[Cell] = []
    for cell in cells:
        last = kept[-1] if kept else None
        if last and _silent(last) and _folds(cell):
            kept[-1] = {**cell, "source": f"{last['source']}\n\n\n{cell['source']}"}
            kept[-1]["metadata"] = {**cell["metadata"]}
        else:
            kept.append(cell)
    return kept


def _folds(cell: Cell) -> bool:
    return cell["cell_type"] == "code" and "hide-input" in cell["metadata"].get("tags", [])


def _silent(cell: Cell) -> bool:
    return _folds(cell) and not cell["outputs"]


# Exercises and guesses


def _exercise(source: str, known: Exercise | None, name: str, notebook: Path) -> list[Cell]:
    """A hole to fill, in the page where it can run there, and the solution folded."""
    solved = folded(f"```ipython3\n{source}\n```", "Show a solution", "solution")
    cells = [_markdown(solved)]
    hole = holed(source)
    if known is None or not known.in_page:
        cell = {"cell_type": "code", "metadata": {}, "source": hole, "outputs": [],
                "execution_count": None}  # fmt: skip
        return [cell, *cells]
    lines = hole.count("\n") + 1
    editor = (
        f'<div class="exercise" data-lesson="{notebook.stem}" data-name="{name}">'
        f'<textarea rows="{lines}" spellcheck="false" autocapitalize="off" '
        f'aria-label="your code for {name}">\n{escape(hole)}</textarea>'
        '<div class="row"><button type="button" class="check">Check</button>'
        '<button type="button" class="anew">Start again</button>'
        '<span class="verdict" aria-live="polite"></span>'
        '<span class="hint">runs in this page; your text stays in this browser</span></div>'
        '<pre class="told" hidden></pre></div>'
    )
    return [_markdown(_raw_lines(editor)), *cells]


def _raw_lines(html: str) -> str:
    """Raw HTML with lines that may hold backticks."""
    return f"``````{{raw}} html\n{html}\n``````"


def _guess(source: str) -> tuple[list[str], str] | None:
    """(names, a form) for a cell that only holds the reader's guesses."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    targets = [node.targets[0] for node in body if isinstance(node, ast.Assign)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if not body or len(names) != len(body) or not all(n.startswith("guess") for n in names):
        return None
    fields = "".join(
        f'<label>{escape(label)} <input type="text"></label>' for label in _labels(source, body)
    )
    form = (
        f'<div class="guess" data-guess="{" ".join(names)}">{fields}'
        '<button type="button">That is my guess</button><span class="said"></span></div>'
    )
    return names, form


def _labels(source: str, body: list[ast.stmt]) -> list[str]:
    """What is guessed: the comments behind the values, or the keys of a dict."""
    lines, found = source.splitlines(), []
    for node in body:
        value = node.value
        comment = lines[node.end_lineno - 1].partition("#")[2].strip()
        comment = re.sub(r"^(your|write your) guess[:,]? *", "", comment)
        if isinstance(value, ast.Dict):
            found += [str(getattr(key, "value", "")) for key in value.keys]
        else:
            found.append(f"Your guess: {comment}" if comment else "Your guess:")
    return found


def figures_of(text: str) -> set[Path]:
    """The files under figures/ that a text shows."""
    return {
        FIGURES / name for name in re.findall(r"figures/([\w.-]+\.(?:png|gif))", text)
        if (FIGURES / name).exists()
    }  # fmt: skip
