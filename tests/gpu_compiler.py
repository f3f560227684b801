"""Compiling the package's Triton kernels for GPUs that are not here.

What would be launched, and what it would need.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = triton.knobs.nvidia.cuobjdump.path
# Bytes a block may use: CUDA C++ programming guide, compute capabilities.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64", torch.int8: "i8",
}  # fmt: skip


@dataclass
class Launch:
    """One kernel call as the package would make it: arguments by name, options of the compiler."""

    kernel: triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Binary:
    """What the compiler made, and what a block or a thread of it needs."""

    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int


class _Recorder:
    """Stands in for a kernel: `kernel[grid](…)` is written down instead of run."""

    def __init__(self, kernel: triton.JITFunction, into: list[Launch]):
        self.kernel, self.into = kernel, into

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def call(*arguments: Any, **keywords: Any) -> None:
            names = {"num_warps", "num_ctas", "num_stages"} & keywords.keys()
            options = {name: keywords.pop(name) for name in names}
            named = dict(zip(self.kernel.arg_names, arguments, strict=False)) | keywords
            assert set(named) == set(self.kernel.arg_names)
            if callable(grid):
                assert all(size >= 1 for size in grid(named))
            self.into.append(Launch(self.kernel, named, options))

        return call


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[Launch]]:
    """Inside the block, what the functions of `module` call is recorded, in order, and not run."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(module).copy().items():
            if isinstance(value, triton.JITFunction):
                patch.setattr(module, name, _Recorder(value, launches))
        yield launches


def compile_for(launch: Launch, capability: int) -> Binary:
    """What Triton and ptxas make of the launch for compute capability 8.0 or 9.0."""
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        # Triton makes 1 a constant, too.
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
        else:
            kind = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
        signature[parameter.name] = kind
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, hints)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launch.options
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return Binary(compiled.asm["ptx"], compiled.metadata.shared, registers, stack)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where ptxas puts what it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    command = [CUOBJDUMP, "--dump-resource-usage", file.name]
    try:
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)
    used = {name: int(re.search(name + r":(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL")}
    return used["REG"], used["STACK"] + used["LOCAL"]
