"""Sentences of the lessons that compare two numbers, against the outputs beside them.

Most of the numbers are measured, so another run may deny a sentence: then the sentence is put
right, or the measurement. `tests/statements.py` has them, lesson by lesson. They speak of the
machine that the course was executed on, the one whose benchmarks the lessons show.
"""

import json
import re
from pathlib import Path

import pytest
from statements import STATEMENTS

from minillm.bench.recording import record_of

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def text_and_outputs(lesson):
    """A lesson's Markdown, and all that its code cells have printed or shown as text."""
    (path,) = NOTEBOOKS.glob(f"{lesson}*.ipynb")
    text, outputs = [], []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            text += ["".join(cell["source"])]
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output.get("data", {}).get("text/markdown", ())
            outputs += ["".join(shown)]
    return "\n\n".join(text), "\n".join(outputs)


@pytest.mark.parametrize("lesson", sorted({s.lesson for s in STATEMENTS}))
def test_outputs_do_not_deny_the_text(lesson):
    text, outputs = text_and_outputs(lesson)
    machine = record_of("speculate")["hardware"]["name"]
    if " threads)" in outputs and f"{machine} (" not in outputs:
        pytest.skip(f"Lesson {lesson} was executed on another machine than {machine}.")
    for statement in (s for s in STATEMENTS if s.lesson == lesson):
        assert statement.words in text, f"{lesson} does not say: {statement.words}"
        numbers = []
        for pattern in statement.found:
            match = re.search(pattern, outputs)
            assert match, f"{lesson}, {statement.words!r}: no output has {pattern}"
            numbers += [float(number.replace(",", "")) for number in match.groups()]
        assert statement.holds(*numbers), f"{lesson}, {statement.words!r}: {numbers}"


def test_each_lesson_has_some():
    lessons = {s.lesson for s in STATEMENTS}
    assert lessons >= {f"{i:02}" for i in range(16)}
