"""What surrounds the code: set-up files that agree, a README that is true, used figures."""

import json
import re
import struct
import tomllib
from pathlib import Path

import pytest
import yaml
from order import ORDER

from minillm import generate
from minillm.bench import BENCHMARKS, tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXTRAS = {"lessons", "tests", "serve", "peers"}


def normalized(requirement: str) -> str:
    return re.split(r"[<>=!;\[ ]", requirement)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    return {normalized(line): line for line in lines if line and not line.startswith("#")}


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == EXTRAS
    wanted = project["dependencies"] + [
        r for extra in project["optional-dependencies"].values() for r in extra
    ]
    assert {normalized(r) for r in wanted} <= pins().keys()
    assert all("==" in line for line in pins().values())
    assert pins()["torch"] == "torch==2.13.0"
    assert pins()["triton"].startswith("triton==3.7.1;")


def test_conda_goes_through_the_same_files():
    """conda brings Python and pip; all else comes through pyproject.toml and constraints.txt."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (through_pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert [re.split("[=<>]", d)[0] for d in conda] == ["python", "pip"]
    assert through_pip[0] == "-c constraints.txt"
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", through_pip[1]).group(1)
    assert len(through_pip) == 2
    makefile = (ROOT / "Makefile").read_text()
    assert f"-c constraints.txt -e '.[{extras}]'" in makefile
    assert set(extras.split(",")) == EXTRAS


def test_readme_names_every_module_and_lesson():
    tree = README.split("## The tree")[1].split("```")[1]
    modules = {p.name for p in (ROOT / "minillm").glob("*.py")} - {"__init__.py"}
    listed = re.findall(r"^  (\w+(?:\.py|/))", tree, re.M)
    folders = {f"{p.parent.name}/" for p in (ROOT / "minillm").glob("*/__init__.py")}
    assert set(listed) == modules | folders
    positions = [ORDER.index(name.removesuffix(".py").removesuffix("/")) for name in listed]
    assert positions == sorted(positions), "the tree is in the order of the imports"
    for room, inside in re.findall(r"^  (\w+)/.*\n((?:    .*\n)+)", tree, re.M):
        files = re.findall(r"^    (\w+)\.py", inside, re.M)
        assert files == [name.partition(".")[2] for name in ORDER if name.startswith(f"{room}.")]
    assert re.findall(r"\(notebooks/(\w+)\.ipynb\)", README) == [p.stem for p in LESSONS]
    for name in re.findall(r"`(test_\w+\.py)`", README):
        assert (ROOT / "tests" / name).exists()
    for name in re.findall(r"\]\((figures/[\w./]+)\)", README):
        assert (ROOT / name).exists()


def test_readme_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets == {
        "setup",
        "lessons",
        "check",
        "test",
        "lint",
        "lab",
        "bench",
        "gpu",
        "student",
        "course",
        "handout",
        "site",
    }
    assert set(re.findall(r"make (\w+)", README)) <= targets


def test_readme_commands_run(default, capsys):
    """Each `python -m minillm …` line of the README that ends by itself, and soon."""
    from minillm.__main__ import main

    lines = re.findall(r"^(?:\$ )?python -m minillm (\w+)(.*?)\s*(?:#.*)?$", README, re.M)
    assert {command for command, _ in lines} >= {"generate", "count", "chat", "bench"}
    for command, rest in lines:
        if command not in ("chat", "serve", "bench"):
            arguments = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
            limit = ["--max-new-tokens", "3", "--device", "cpu"] if command == "generate" else []
            assert main([command, *arguments, *limit]) == 0


def test_readme_shows_the_real_output(default):
    """The command's output on the first screen is what the model says."""
    prompt, n, shown = re.search(
        r'minillm generate "(.*?)" --max-new-tokens (\d+)\n(.*?)\n```', README, re.S
    ).groups()
    model, tokenizer = default
    answer = generate(model, tokenizer.encode(prompt), int(n))
    assert tokenizer.decode(answer) == shown


def test_readme_results_are_the_recorded_ones():
    results = (ROOT / "figures" / "RESULTS.md").read_text(encoding="utf-8")
    table = results.split(tables.MARKERS[0])[1].split(tables.MARKERS[1])[0].strip()
    assert table == tables.results_table(ROOT / "figures" / "data")
    first, last = tables.HIGHLIGHT_MARKERS
    assert README.split(first)[1].split(last)[0].strip() == tables.highlights(
        ROOT / "figures" / "data"
    )
    assert README.split(first)[1].split(last)[0].count("\n") == 11, "eight rows and a head"
    for path in (ROOT / "figures" / "data").glob("*.json"):
        document = json.loads(path.read_text())
        assert path.name == f"{document['name']}.{document['hardware']['label']}.json"
        assert {"torch", "python", "transformers"} <= document["versions"].keys()
        assert all(len(values) >= 5 for values in document["repeats"].values())


def test_figures_are_small_and_used():
    notebooks = (ROOT / "notebooks").rglob("*.ipynb")
    text = "".join(p.read_text(encoding="utf-8") for p in notebooks)
    for path in (ROOT / "figures").glob("*.png"):
        assert path.stat().st_size <= 100_000
        assert f'\\"{path.stem}\\"' in text  # a lesson saves it
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert 600 < width < 3000 and 300 < height < 3000  # twice the size on the page


def test_ci_installs_a_browser_and_calls_make_test():
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text().split("\n")
        if line and not line.startswith("#")
    ]
    assert commands[:2] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."']
    assert commands[2].startswith("command -v chromium >/dev/null || {")
    needed = "if command -v chromium >/dev/null; then export SITE_NEEDS_BROWSER=1; fi"
    assert commands[3:] == [needed, "exec make test"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_recorded_for_this_kind_of_machine(name):
    assert list((ROOT / "figures" / "data").glob(f"{name}.cpu-*.json"))
