"""Where things are."""

from pathlib import Path

SITE = Path(__file__).resolve().parent.parent
ROOT = SITE.parent
BUILD = ROOT / "build" / "site"
NODE = BUILD / "node"  # node_modules is in here
SOURCE, HTML = BUILD / "source", BUILD / "html"
PACKAGE, NOTEBOOKS, FIGURES = ROOT / "minillm", ROOT / "notebooks", ROOT / "figures"


def lessons() -> list[Path]:
    """The lessons' notebooks in their order, without what goes further."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def further() -> list[Path]:
    """Notebooks that go on where a lesson's main path ends."""
    return sorted(NOTEBOOKS.glob("further/*.ipynb"))
