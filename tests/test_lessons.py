"""The notebooks as documents.

Executed in order, exercises that nbgrader understands, cells that can be read.
"""

import json
import re
from pathlib import Path

import pytest

LESSONS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=LESSONS, ids=lambda p: p.stem)
def cells(request) -> list[dict]:
    return json.loads(request.param.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def code(cells: list[dict]) -> list[dict]:
    return [c for c in cells if c["cell_type"] == "code"]


def test_there_are_lessons():
    assert [p.stem[:2] for p in LESSONS] == [f"{i:02}" for i in range(len(LESSONS))]
    assert len(LESSONS) >= 4


def test_committed_as_executed(cells):
    counts = [c["execution_count"] for c in code(cells)]
    assert counts == list(range(1, len(counts) + 1))
    for output in (o for c in code(cells) for o in c["outputs"]):
        assert output["output_type"] != "error"
        text = json.dumps(output)
        assert output.get("name") != "stderr"
        for word in ("Warning", "Traceback", "/root/", "/home/", "/tmp/", "widget"):
            assert word not in text


def test_cells_can_be_read(cells):
    assert max(len(source(c).splitlines()) for c in code(cells)) <= 24
    assert len(cells) <= 66
    words = sum(len(source(c).split()) for c in cells if c["cell_type"] == "markdown")
    assert words > sum(len(source(c).split()) for c in code(cells)) * 0.8  # more is told than typed


def test_exercises_are_nbgraders(cells):
    solutions = [c for c in cells if c["metadata"].get("nbgrader", {}).get("solution")]
    tests = [c for c in cells if c["metadata"].get("nbgrader", {}).get("grade")]
    assert len(solutions) == len(tests) >= 1
    for cell in solutions:
        assert "### BEGIN SOLUTION" in source(cell) and "### END SOLUTION" in source(cell)
    for cell in tests:
        assert "assert" in source(cell) and cell["metadata"]["nbgrader"]["points"] > 0
    ids = [c["metadata"]["nbgrader"]["grade_id"] for c in solutions + tests]
    assert len(set(ids)) == len(ids)


def test_headings_follow_the_rhythm(cells):
    text = "\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    assert text.startswith("# ")
    for heading in ("Exercise", "## Takeaways"):
        assert heading in text


def test_pictures_are_described_and_there(cells):
    for cell in code(cells):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                assert output["metadata"]["image/png"]["alt"]
        if "plots.save(" in source(cell) and len(source(cell).splitlines()) > 12:
            assert "hide-input" in cell["metadata"].get("tags", ())
        if "hide-input" in cell["metadata"].get("tags", ()):  # JupyterLab folds by another mark
            assert cell["metadata"]["jupyter"]["source_hidden"]
    text = "\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    for alt, link in re.findall(r"(?<=!\[)([^]]*)\]\(([^)]+)\)", text):
        assert alt and (LESSONS[0].parent / link).stat().st_size <= 300_000
    for link in re.findall(r"\]\(([^):]+\.(?:ipynb|md|py))\)", text):
        assert (LESSONS[0].parent / link).exists(), link


def test_something_is_compared_with_its_recorded_output(cells):
    """At least one cell that nbval must find unchanged, and never one with a clock in it."""
    checked = [source(c) for c in code(cells) if source(c).startswith("# NBVAL_CHECK_OUTPUT")]
    assert checked
    assert not any("perf_counter" in s or "seconds_per_call" in s for s in checked)
