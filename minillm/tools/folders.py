"""Where things are on this machine: the project, its figures and recorded results, the cache."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
PACKAGE_DATA = PACKAGE / "data"
"""What comes with the package: a text, the trained student, the trained heads."""


def project_folder() -> Path:
    """The repository that holds this package, or the working folder if installed elsewhere."""
    root = PACKAGE.parent
    return root if (root / "notebooks").is_dir() else Path.cwd()


def figures_folder() -> Path:
    """`figures/`, or the folder that $MINILLM_FIGURES names."""
    return project_folder() / os.environ.get("MINILLM_FIGURES", "figures")


def data_folder() -> Path:
    """`figures/data/`, where the benchmarks' recorded results are."""
    return project_folder() / "figures" / "data"


def cache_folder() -> Path:
    """Where fetched checkpoints are kept: $MINILLM_CACHE, or minillm/ in the user's cache."""
    if base := os.environ.get("MINILLM_CACHE"):
        return Path(base).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"
