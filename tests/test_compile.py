"""The attention kernels compiled for GPUs that need not be here.

They fit, spill next to nothing, use the matrix instructions, compute nothing twice, and load the
next tiles while they work on one. Compute capability 8.0 stands for the A100 and its kind, 9.0 for
the H100. What is compiled is what the package would launch.
"""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton, which exists for Linux")
import triton
import triton.language as tl
from gpu_compiler import (
    SHARED_LIMIT,
    SPILL_ALLOWED,
    Binary,
    Launch,
    compile_for,
    recorded,
    specialization,
)

from minillm.kernels import flash_backward, flash_decode, flash_forward, tuning

pytestmark = pytest.mark.compile
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROWS = {"part, 1 row": (1, 2, 2), "part, 32 rows": (4, 16, 2)}  # T, H, K
KERNELS = ("forward", "dkv", "dq", *ROWS)


def launch(
    name: str, dtype: torch.dtype, D: int, capability: int = 90, *,
    causal: bool = True, T: int = 512, S: int = 512,
) -> Launch:  # fmt: skip
    """The call of that kernel for a batch of 2 with 4 query heads on 2, as on such a chip.

    For decode, T and the heads are those in `ROWS`.
    """
    with mock.patch.object(tuning, "is_hopper", lambda _: capability >= 90):
        return call(name, dtype, D, causal, T, S)


def call(name: str, dtype: torch.dtype, D: int, causal: bool, T: int, S: int) -> Launch:

    def tensors(T: int, H: int, K: int) -> list[torch.Tensor]:
        shapes = ((2, T, H, D), (2, S, K, D), (2, S, K, D))
        return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]

    if name in ROWS or name == "merge":
        with recorded(flash_decode) as launches:
            flash_decode.flash_decode(*tensors(*ROWS.get(name, ROWS["part, 1 row"])), causal, 0.1)
        return launches[name == "merge"]
    q, k, v = tensors(T, 4, 2)
    if name == "forward":
        with recorded(flash_forward) as launches:
            flash_forward.flash_forward(q, k, v, causal, 0.1)
        return launches[0]
    lse = torch.empty(2, 4, T, device="meta")
    with recorded(flash_backward) as launches:
        flash_backward.flash_backward(q, q, k, v, q, lse, causal, 0.1)
    return launches[("delta", "dkv", "dq").index(name)]


def fits(call: Launch, capability: int, *, spilled_bytes: int = SPILL_ALLOWED) -> Binary:
    binary = compile_for(call, capability)
    assert binary.shared_bytes <= SHARED_LIMIT[capability]
    assert binary.spilled_bytes <= spilled_bytes, (
        f"{binary.spilled_bytes} bytes spilled, {binary.registers} registers"
    )
    return binary


def matrix_instructions(binary: Binary) -> set[str]:
    return {name for name in ("wgmma.mma_async", "mma.sync") if name in binary.ptx}


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "D"),
    # float16 compiles to the same code except for the type's name: two sizes are enough.
    [*itertools.product((FP32, BF16), (16, 32, 64, 96, 128, 256)), (FP16, 64), (FP16, 128)],
    ids=str,
)
def test_defaults(dtype, D, name, capability):
    binary = fits(launch(name, dtype, D, capability), capability)
    if dtype == FP32:  # exact: no matrix instruction takes float32 without rounding it to TF32
        assert not matrix_instructions(binary) and "tf32" not in binary.ptx
        assert "fma.rn.f32" in binary.ptx
        return
    assert f".{'bf16' if dtype == BF16 else 'f16'}" in binary.ptx
    possible = {"wgmma.mma_async", "mma.sync"} if capability == 90 else {"mma.sync"}
    if capability == 90 and name not in ROWS and (name, D) != ("dkv", 256):
        possible = {"wgmma.mma_async"}  # the tiles have enough rows for a warp group
    assert matrix_instructions(binary) & possible


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("changes", [{"causal": False}, {"T": 509, "S": 1021}], ids=str)
def test_without_a_mask_and_odd_sizes(name, changes):
    """Sizes that 16 doesn't divide, for which Triton compiles another kernel.

    A decode kernel's T is that in `ROWS`.
    """
    for dtype, D in ((BF16, 128), (FP32, 64)):
        fits(launch(name, dtype, D, **changes), 90)


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize(("dtype", "D"), [(FP32, 128), (BF16, 16), (BF16, 96), (FP16, 256)])
def test_delta_and_merge(monkeypatch, dtype, D, capability):
    fits(launch("delta", dtype, D, capability), capability)
    for n_parts in (1, 8, flash_decode._MAX_PARTS):
        monkeypatch.setattr(flash_decode, "_CPU_PARTS", n_parts)
        call = launch("merge", dtype, D, S=64 * flash_decode._MAX_PARTS)
        assert call.arguments["n_parts"] == n_parts
        fits(call, capability)


LISTS = {
    "forward": tuning.forward_configs,
    "dkv": tuning.dkv_configs,
    "dq": tuning.dq_configs,
}


def listed() -> list[Any]:
    return [
        (name, D, capability, i)
        for name, choose in LISTS.items()
        for D in (64, 128, 256)
        for capability in SHARED_LIMIT
        for i in range(len(choose(D, BF16, capability >= 90)))
    ]


def with_config(call: Launch, config: triton.Config) -> Launch:
    assert config.kwargs.keys() <= call.arguments.keys()
    call.arguments.update(config.kwargs)
    call.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return call


@pytest.mark.parametrize(("name", "D", "capability", "i"), listed())
def test_every_configuration_that_may_be_chosen(name, D, capability, i):
    """Fast on paper: nothing is computed twice, and every loop loads while it multiplies."""
    config = LISTS[name](D, BF16, capability >= 90)[i]
    binary = fits(with_config(launch(name, BF16, D, capability), config), capability)
    assert matrix_instructions(binary)
    assert not binary.computed_twice()
    assert len(binary.ahead()) == 2 and all(binary.ahead())  # with a mask and without


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", ["forward", "dq"])
def test_by_pointers(name, D):
    """The default without the copy engine, for inputs that are not aligned."""
    by_engine = launch(name, BF16, D)
    by_pointers = with_config(launch(name, BF16, D), tuning.by_pointers(LISTS[name](D, BF16)[0]))
    by_engine, by_pointers = fits(by_engine, 90), fits(by_pointers, 90)
    assert "cp.async.bulk.tensor" in by_engine.ptx
    assert "cp.async.bulk.tensor" not in by_pointers.ptx
    assert by_engine.registers <= by_pointers.registers
    assert all(by_pointers.ahead()) and not by_pointers.computed_twice()


@pytest.mark.parametrize("D", [64, 128])
def test_specialized(D):
    for config in tuning.specialized_configs(D):
        binary = fits(with_config(launch("forward", BF16, D), config), 90)
        assert "ttg.warp_specialize(" in binary.ttgir and not binary.computed_twice()


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", ROWS)
def test_decode_loads_ahead(name, D, capability):
    binary = fits(launch(name, BF16, D, capability), capability)
    assert binary.buffers() >= 2 and all(binary.ahead()) and not binary.computed_twice()


def test_lengths_need_no_new_kernel():
    """Triton compiles another kernel for sizes of 1 and multiples of 16, unless told not to."""
    keys: dict[str, set[str]] = {}
    for T, S in ((1, 1), (1, 16), (2, 40), (16, 16), (7, 160), (64, 512), (33, 1000)):
        for name in ("forward", *ROWS):
            call = launch(name, BF16, 64, T=T, S=max(S, 4))
            keys.setdefault(name, set()).add(str(specialization(call)))
    assert {name: len(found) for name, found in keys.items()} == dict.fromkeys(keys, 1)


def test_the_tuner_knows_its_keys():
    """Each head dimension and dtype has one autotuner, with the whole list."""
    for name, kernel in (
        ("forward", flash_forward.flash_forward_kernel),
        ("dkv", flash_backward.dkv_kernel),
        ("dq", flash_backward.dq_kernel),
    ):
        choose = LISTS[name]
        tuner, other = (tuning.tuner(kernel, choose, D, BF16, True) for D in (64, 128))
        assert tuner is tuning.tuner(kernel, choose, 64, BF16, True) is not other
        assert tuner.fn is kernel and tuner.cache_results
        assert {"LENGTH", "CAUSAL"} <= set(tuner.keys) <= set(kernel.arg_names)
        assert ("DESCRIPTORS" in tuner.keys) == (name != "dkv")
        assert [str(c) for c in tuner.configs] == [str(c) for c in choose(64, BF16)]


@triton.jit
def rounding_kernel(X, OUT):
    """A product in Triton's default precision, which is TF32."""
    offsets = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(X + offsets)
    tl.store(OUT + offsets, tl.dot(x, x))


def test_what_is_wrong_would_be_seen():
    """If these did not fail, the tests above could not either."""
    call = with_config(
        launch("dq", BF16, 64, 80),
        triton.Config({"BLOCK_T": 64, "BLOCK_S": 32}, num_warps=1, num_stages=1),
    )
    crowded = compile_for(call, 80)
    assert crowded.spilled_bytes > SPILL_ALLOWED
    assert not crowded.buffers() and crowded.ahead() == [0, 0]
    # 64 rows of queries are too few for two groups of warps.
    config = triton.Config({"BLOCK_T": 64, "BLOCK_S": 64}, num_warps=8, num_stages=3)
    assert compile_for(with_config(launch("dq", BF16, 128), config), 90).computed_twice()
    # Two stages: the next tile is asked for at the end of the loop and waited for at its top.
    config = triton.Config({"BLOCK_T": 32, "BLOCK_S": 128}, num_warps=8, num_stages=2)
    assert compile_for(with_config(launch("dkv", BF16, 64), config), 90).ahead() == [0, 0]
    x = torch.empty(32, 32, device="meta")
    call = Launch(rounding_kernel, {"X": x, "OUT": x}, {"num_warps": 4})
    for capability in SHARED_LIMIT:
        rounded = compile_for(call, capability)
        assert "tf32" in rounded.ptx and matrix_instructions(rounded)
