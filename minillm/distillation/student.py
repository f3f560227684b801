"""The student: a small model made of its teacher's layers, and the one packaged with minillm.

Sources: Sanh et al. 2019 (DistilBERT), section 3: a student starts from layers of its teacher.
Cost: the default student has 4 of 30 layers and shares the head, which is as large as eight layers.

The packaged student was trained by `python -m minillm.distillation`; `data/student.json` has the
settings and the loss curve. Its matrices are stored in int8 with one scale per row
(`minillm.quantization.grid`).
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.model import MATRICES, Decoder, Layers, Linear, check_plain
from minillm.quantization.grid import QuantizedMatrix, to_int8
from minillm.quantization.linear import Int8Linear
from minillm.tools.checks import brief, check_whole
from minillm.tools.folders import PACKAGE_DATA
from minillm.training import save_whole
from minillm.weights.loading import load

PACKAGED = PACKAGE_DATA / "student.safetensors"


def make_student(
    teacher: Decoder, n_layers: int, *, chosen: Sequence[int] | None = None
) -> Decoder:
    """A model of `n_layers` copies of the teacher's layers.

    chosen: their numbers; by default evenly spaced, the last layer included. The embedding and the
    head are the teacher's own, not copies.
    Raises ValueError for layers that the teacher does not have, and for a teacher whose matrices
    are not plain `Linear`.
    """
    check_whole("n_layers", n_layers)
    L = len(teacher.layers)
    if n_layers > L:
        raise ValueError(
            f"n_layers is {n_layers}; {teacher.config.name} has {L}, so give at most {L}."
        )
    if chosen is None:  # the last layer of each of n equal parts
        chosen = [round((i + 1) * L / n_layers) - 1 for i in range(n_layers)]
    if len(chosen) != n_layers or not all(type(i) is int and 0 <= i < L for i in chosen):
        raise ValueError(
            f"chosen is {brief(chosen)}; give {n_layers} numbers of layers, from 0 to {L - 1}."
        )
    check_plain(teacher, "make a student of")
    student = _shell(teacher, n_layers)
    student.norm = copy.deepcopy(teacher.norm)
    student.layers = Layers(copy.deepcopy(teacher.layers[i]) for i in chosen)
    for layer in student.layers:  # the copies still have the teacher's
        layer.config = student.config
    return student.eval()


def _shell(teacher: Decoder, n_layers: int) -> Decoder:
    """The teacher's embedding and head, around layers whose parameters are still empty."""
    with torch.device("meta"):
        student = Decoder(dataclasses.replace(teacher.config, n_layers=n_layers))
    student.embed, student.head = teacher.embed, teacher.head
    return student


def save_student(student: Decoder, path: Path) -> None:
    """Write everything but the embedding and the head: matrices in int8, the rest in bfloat16."""
    tensors: dict[str, Tensor] = {}
    for name, value in student.layers.state_dict(prefix="layers.").items():
        if _is_matrix(name):
            matrix = to_int8(value)
            tensors |= {name: matrix.q, _scale_of(name): matrix.scale}
        else:
            tensors[name] = value.bfloat16()
    tensors["norm"] = student.norm.detach().bfloat16()
    save_whole(tensors, path, {})


def load_student(
    teacher: Decoder | None = None,
    *,
    path: Path = PACKAGED,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> Decoder:
    """The trained student, with its teacher's embedding and head.

    teacher: the model that it drafts for; by default the default checkpoint, loaded with device and
    dtype as in `minillm.load`. With a quantized teacher the student multiplies with the stored int8
    matrices; otherwise they are dequantized to the teacher's dtype.
    path: another file from `save_student`. Raises FileNotFoundError or ValueError for a file that
    is missing, damaged, or made for another teacher.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; train a student with python -m minillm.distillation."
        )
    if teacher is None:
        teacher, _ = load(device=device, dtype=dtype)
    stored = _read(path, teacher.device)
    # One attn_norm for each layer of the student.
    student = _shell(teacher, max(1, sum(name.endswith(".attn_norm") for name in stored)))
    own = {n: p.shape for n, p in student.named_parameters() if n.startswith(("layers.", "norm"))}
    # Every matrix (out, in) has its scales (out,) beside it; nothing else is in the file.
    scales = {_scale_of(name): shape[:1] for name, shape in own.items() if _is_matrix(name)}
    if {name: t.shape for name, t in stored.items()} != own | scales:
        raise ValueError(
            f"{path} was made for another model than {teacher.config.name}; load the student's own "
            "teacher."
        )
    _fill(student, stored, list(own), teacher)
    return student.eval().requires_grad_(False)


def _read(path: Path, device: torch.device) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it or train it again.") from error


def _fill(student: Decoder, stored: dict[str, Tensor], own: list[str], teacher: Decoder) -> None:
    """Give the student its parameters `own`, in the teacher's dtype or with int8 matrices."""
    matrices = {
        name: QuantizedMatrix(stored[name], stored[_scale_of(name)])
        for name in own
        if _is_matrix(name)
    }
    plain = {n: matrices[n].dequantized() if n in matrices else stored[n] for n in own}
    in_dtype = {name: value.to(teacher.dtype) for name, value in plain.items()}
    student.load_state_dict(in_dtype, strict=False, assign=True)
    if type(teacher.head) is Linear:
        return
    for name, matrix in matrices.items():  # a quantized teacher
        layer, _, which = name.removesuffix(".weight").rpartition(".")  # "layers.0", "qkv"
        linear = student.get_submodule(f"{layer}.{which}")
        setattr(student.get_submodule(layer), which, Int8Linear(matrix, linear.bias))


def _is_matrix(name: str) -> bool:
    return name.endswith(tuple(f".{matrix}.weight" for matrix in MATRICES))


def _scale_of(name: str) -> str:
    return name.removesuffix("weight") + "scale"
