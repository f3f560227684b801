"""The wheel, installed into an environment of its own: its files are all that is needed."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from minillm import __version__

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "minillm", source / "minillm")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path) -> str:
    """An environment that holds the wheel alone; what it depends on is that of these tests."""
    folder = wheel.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip(python, "install", "--no-deps", str(wheel))
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments[1:]], check=True)


def run(python: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [python, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_holds_the_package_and_nothing_else(wheel):
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "minillm"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert names == set(tracked.stdout.split())


def test_it_names_its_version_and_its_extras(wheel):
    (name,) = (name for name in ZipFile(wheel).namelist() if name.endswith("METADATA"))
    metadata = ZipFile(wheel).read(name).decode()
    assert re.findall(r"^Provides-Extra: (.*)$", metadata, re.M) == [
        "lessons", "tests", "serve", "peers",
    ]  # fmt: skip
    assert f"\nVersion: {__version__}\n" in metadata
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_it_counts_and_generates(python, default, tmp_path):
    """`default` has fetched the checkpoint, which the environment finds in the cache."""
    where = run(python, "-c", "import minillm; print(minillm.__file__)", folder=tmp_path)
    assert Path(where).is_relative_to(Path(python).parent.parent)
    assert "6,738,415,616" in run(python, "-m", "minillm", "count", "llama-2-7b", folder=tmp_path)
    said = run(
        python, "-m", "minillm", "generate", "--max-new-tokens", "4", "The capital of France is",
        folder=tmp_path,
    )  # fmt: skip
    assert said.startswith("Paris.")
    # What is packaged beside the code: the student, the heads, a text, the table of servers.
    data = (
        "from minillm import load\n"
        "from minillm.distillation.student import load_student\n"
        "from minillm.speculation.medusa_heads import load_heads\n"
        "from minillm.tools.folders import PACKAGE_DATA\n"
        "load_student(load()[0]); load_heads()\n"
        "print(*sorted(path.suffix for path in PACKAGE_DATA.iterdir()))"
    )
    assert run(python, "-c", data, folder=tmp_path).split().count(".safetensors") == 2


def test_it_serves(python, default, tmp_path):
    command = [python, "-m", "minillm", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        try:
            url = re.search(r"http://\S+:\d+/v1", server.stdout.readline())[0]
            ask = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{url}/completions", json=ask, timeout=60).json()
        finally:
            server.terminate()
    assert answer["choices"][0]["text"].startswith(" Paris.")
