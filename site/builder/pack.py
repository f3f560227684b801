"""What the browser gets: the plain modules and the live pages in a zip, and Python itself."""

import shutil
import subprocess
import zipfile
from pathlib import Path

from builder.paths import NODE, ROOT, SITE
from builder.plain import modules, plain_modules

FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json")


def pack_modules(target: Path) -> None:
    """minillm.zip, always the same bytes for the same files."""
    paths = modules()
    entries = {str(paths[name].relative_to(ROOT)): paths[name] for name in plain_modules()}
    entries |= {str(path.relative_to(SITE)): path for path in sorted(SITE.glob("live/*.py"))}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(entries.items()):
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def pack_python(target: Path) -> None:
    """Pyodide's own files, with its library compiled, so that it starts faster."""
    target.mkdir(parents=True, exist_ok=True)
    package = NODE / "node_modules" / "pyodide"
    for name in FILES:
        shutil.copy2(package / name, target / name)
    library = target / "python_stdlib.zip"
    if not library.exists():
        script = SITE / "builder" / "pack_python.mjs"
        subprocess.run(["node", script, package, library], check=True)
