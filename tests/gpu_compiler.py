"""Compiling the package's Triton kernels for GPUs that are not here: what would be launched, and what it would need."""

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
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may use: CUDA C++ programming guide, compute capabilities
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.int8: "i8"}


@dataclass
class Launch:
    """One kernel call as the package would make it: the kernel, its arguments by name, its compile-time constants."""

    kernel: triton.JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass
class Binary:
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
            options = {key: keywords.pop(key) for key in ("num_warps", "num_ctas", "num_stages") if key in keywords}
            named = dict(zip(self.kernel.arg_names, arguments, strict=False)) | keywords
            assert set(named) == set(self.kernel.arg_names)
            if callable(grid):
                assert all(size >= 1 for size in grid(named))
            self.into.append(Launch(self.kernel, named, options))

        return call


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[Launch]]:
    """Inside the block, the kernels called by the functions of `module` are recorded, in order, and not run."""
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
        if parameter.is_constexpr or (type(value) is int and value == 1):  # Triton makes 1 a constant, too
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Binary(compiled.asm["ptx"], compiled.metadata.shared, registers, stack)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where ptxas puts what it spills; read from the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        report = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)
    return int(re.search(r"REG:(\d+)", report)[1]), int(re.search(r"STACK:(\d+)", report)[1]) + int(re.search(r"LOCAL:(\d+)", report)[1])
