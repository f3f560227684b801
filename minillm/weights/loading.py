"""Loading a model and its tokenizer: a folder, a GGUF file, a hub id, the default checkpoint."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from minillm.model import Decoder
from minillm.tokenizer import Tokenizer
from minillm.tools.checks import brief
from minillm.tools.devices import device_and_dtype
from minillm.weights.build import Checkpoint, build
from minillm.weights.default import fetch_default
from minillm.weights.files import PATH, check_file
from minillm.weights.gguf_checkpoint import GGUFCheckpoint
from minillm.weights.safetensors_folder import SafetensorsFolder
from minillm.weights.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

_SCHEMES = ("int8", "int4")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(
    source: str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> tuple[Decoder, Tokenizer | None]:
    """A model and its tokenizer.

    source: None for the default checkpoint, a folder in Hugging Face format, a .gguf file, or a
    hub id ("org/name"). device and dtype: see `minillm.tools.devices.device_and_dtype`; dtype may
    also be one of two schemes of `minillm.quantize`, "int8" or "int4"; for int4 a Q4_0 or Q4_1 file
    keeps its own numbers. A folder without tokenizer files gives (model, None). Raises
    FileNotFoundError or ValueError in one sentence.
    """
    # What quantized matrices leave in floating point is bfloat16.
    scheme = dtype if dtype in _SCHEMES else None
    plain = "bfloat16" if scheme else dtype
    device, dtype = device_and_dtype(device, plain, beside=_SCHEMES)
    with opened(source) as (checkpoint, tokenizer):
        return build(checkpoint, device, dtype, scheme), tokenizer


@contextmanager
def opened(source: str | Path | None) -> Iterator[tuple[Checkpoint, Tokenizer | None]]:
    """The checkpoint and tokenizer of a source, for a `with` block that reads from them.

    Source and errors as for `load`; errors while reading inside the block are included.
    """
    # os.path returns False where Path's methods raise: for a user or a name that cannot exist.
    path = fetch_default() if source is None else Path(os.path.expanduser(source))
    try:
        checkpoint, tokenizer = _open(path, source)
        rows = checkpoint.config.vocab_size  # of the embedding, one for each token id
        if tokenizer is not None and tokenizer.n_vocab > rows:
            raise ValueError(
                f"{checkpoint.label}: the tokenizer has {tokenizer.n_vocab} ids, the model only "
                f"{rows}."
            )
        if tokenizer is not None:
            tokenizer.n_rows = rows
        yield checkpoint, tokenizer
    except OSError as error:
        if error.errno is None:
            raise  # our own message
        raise ValueError(
            f"{brief(str(path), PATH)} cannot be read ({error.strerror}); check its permissions."
        ) from error


def _open(path: Path, source: str | Path | None) -> tuple[Checkpoint, Tokenizer | None]:
    # A file: GGUF
    if os.path.exists(path) and not os.path.isdir(path):
        check_file(path)
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is a file but not a .gguf one; give a folder in Hugging Face format, a "
                ".gguf file or a hub id."
            )
        checkpoint = GGUFCheckpoint(path)
        return checkpoint, tokenizer_from_gguf(checkpoint.fields, name=path.stem)
    # Neither a file nor a folder: perhaps a hub id
    if not os.path.isdir(path):
        if not _HUB_ID.fullmatch(str(source)):
            raise FileNotFoundError(
                f"{brief(str(source))} does not exist; give a folder in Hugging Face format, a "
                ".gguf file or a hub id like org/name."
            )
        path = _download(str(source))
    return SafetensorsFolder(path), tokenizer_from_folder(path)


def _download(hub_id: str) -> Path:
    """The folder of a hub checkpoint, fetched by huggingface_hub or found in its cache.

    Safetensors, JSON and chat templates only.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json", "*.jinja"])
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        said = str(error).strip() or type(error).__name__
        raise FileNotFoundError(
            f"{hub_id} is not a local path and could not be fetched from the hub: "
            f"{brief(said.splitlines()[0], 300)}."
        ) from error
