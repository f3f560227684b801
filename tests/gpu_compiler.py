"""Compiling the package's Triton kernels for GPUs that are not here.

What would be launched, and the resources that it would need.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = triton.knobs.nvidia.cuobjdump.path
# Bytes that a block may use: CUDA C++ programming guide, compute capabilities.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
# Bytes of a thread's registers that may go to the stack: a fifth of its 255 registers of 4 bytes.
# They stay in the L1 cache and are used once a tile; with a tile of half the size, all keys would
# be loaded twice instead.
SPILL_ALLOWED = 192
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
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

    ptx: str = field(repr=False)
    # Triton's own form after its GPU passes, with layouts and the software pipeline
    ttgir: str = field(repr=False)
    cubin: bytes = field(repr=False)
    shared_bytes: int
    registers: int
    spilled_bytes: int

    def computed_twice(self) -> list[str]:
        """Products whose warps together cover more than the result, so that some compute the same.

        All warps together give warpsPerCTA of the layout times the tile of one warp's instruction.
        """
        twice = []
        for name, layout in re.findall(r"(#mma\d*) = #ttg\.nvidia_mma<\{(.*?)\}>", self.ttgir):
            warps, instruction = (
                [int(n) for n in re.search(rf"{key} = \[(.*?)\]", layout)[1].split(",")][:2]
                for key in ("warpsPerCTA", "instrShape")
            )
            result = rf"(?:warp_group_dot|tt\.dot) .*-> tensor<(\d+)x(\d+)xf32, {name}>"
            for rows, columns in re.findall(result, self.ttgir):
                covered = [w * n for w, n in zip(warps, instruction, strict=True)]
                if covered[0] > int(rows) or covered[1] > int(columns):
                    twice.append(f"{rows} × {columns} by warps {warps} of {instruction}")
        return twice

    def buffers(self) -> int:
        """The tiles of keys or values that fit at the same time; 0 without a pipeline."""
        found = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", self.ttgir)
        return min(map(int, found), default=0)

    def ahead(self) -> list[int]:
        """For each loop that multiplies, the copies that may be in flight during its products.

        0: every copy is waited for before the first product and the next one is issued after the
        last, so that nothing is loaded meanwhile. The copy engine has no counter to wait for: then
        one tile is multiplied, one is asked for at the end of the loop, and the rest are in flight.
        """
        found = []
        for body in self._innermost_loops():
            products = [match.start() for match in re.finditer(r"(?:warp_group_dot|dot) ", body)]
            if not products:
                continue
            early = re.findall("async_copy_global|async_tma_copy", body[: products[-1]])
            waits = [int(n) for n in re.findall(r"async_wait.*?num = (\d+)", body)]
            by_engine = self.buffers() - 2 if "async_tma_copy" in body else 0
            found.append(len(early) + max([by_engine, *waits]))
        return found

    def _innermost_loops(self) -> list[str]:
        """The text of each loop without a loop inside; a block ends where its indentation does."""
        loop = r"^(?=( *)\S.*scf\.for.*\n((?:\1 .*\n)+))"
        bodies = [body for _, body in re.findall(loop, self.ttgir, re.MULTILINE)]
        return [body for body in bodies if "scf.for" not in body]


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
def recorded(module: ModuleType, launches: list[Launch] | None = None) -> Iterator[list[Launch]]:
    """Inside the block, kernels called by functions of `module` are recorded in order, not run."""
    launches = [] if launches is None else launches
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(module).copy().items():
            if isinstance(value, triton.JITFunction):
                patch.setattr(module, name, _Recorder(value, launches))
        yield launches


Specialization = tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]
"""The signature, the constants and the hints for which Triton compiles a kernel once."""


def specialization(launch: Launch) -> Specialization:
    """What Triton derives from the arguments of this call; calls with equal ones share a binary."""
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialized = not parameter.do_not_specialize
        # Triton makes 1 a constant, too.
        if parameter.is_constexpr or (type(value) is int and value == 1 and specialized):
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
            aligned = value.storage_offset() * value.itemsize % 16 == 0
        else:
            kind = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
            aligned = type(value) is int and value % 16 == 0
        signature[parameter.name] = kind
        if aligned and specialized and not parameter.do_not_specialize_on_alignment:
            hints[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, hints


def compile_for(launch: Launch, capability: int) -> Binary:
    """The launch, compiled by Triton and ptxas for compute capability 8.0 or 9.0."""
    source = ASTSource(launch.kernel, *specialization(launch))
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launch.options
    )
    registers, stack = _resources(compiled.asm["cubin"])
    asm = compiled.asm
    shared = compiled.metadata.shared
    return Binary(asm["ptx"], asm["ttgir"], asm["cubin"], shared, registers, stack)


def instructions_a_step(binary: Binary) -> int:
    """The machine instructions of the longest loop, 16 bytes each, from its branch back."""
    loops = re.findall(
        r"/\*([0-9a-f]{4,})\*/[^;]*\bBRA[^;]* 0x([0-9a-f]+)", _cuobjdump(binary.cubin, "-sass")
    )
    return max((int(branch, 16) - int(to, 16)) // 16 + 1 for branch, to in loops)


def _cuobjdump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [CUOBJDUMP, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where ptxas puts what it spills."""
    report = _cuobjdump(cubin, "--dump-resource-usage")
    used = {name: int(re.search(name + r":(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL")}
    return used["REG"], used["STACK"] + used["LOCAL"]
