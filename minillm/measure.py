"""Measuring this machine: time, memory bandwidth and the speed of matrix products.

Lessons and benchmarks compare with two bounds: the most bytes per second that memory delivers, and
the most FLOP/s that a large matrix product reaches. No single routine reads at full speed on every
machine, so the first is the best of a copy, a sum and a matrix-vector product (what a decode step
does with the weights), timed by events on a GPU. No library multiplies fastest everywhere, so on a
CPU the second is the best of two. A peak is the best of several runs, since a slower run was only
disturbed; everything else is a median.
"""

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, median_high
from typing import Any, TypeVar

import torch

from minillm import cpu_products

Result = TypeVar("Result")

Repeats = dict[str, list[float]]
"""The measurements of every repeat, by name."""

QUICK = bool(os.environ.get("MINILLM_QUICK"))
"""Measure everything once. Tests of lessons set it: there a cell has to run, and no time counts."""


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call of `fn()`, including its GPU work but none that was queued before."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return time.perf_counter() - start


def seconds_per_call(
    fn: Callable[[], Any],
    device: torch.device,
    repeats: int = 7,
    statistic: Callable[[list[float]], float] = median,
) -> float:
    """`statistic` of the `seconds` of `repeats` calls of `fn()`, after two warm-up calls."""
    if QUICK:
        return seconds(fn, device)
    return statistic([seconds(fn, device) for _ in range(repeats + 2)][2:])


def device_seconds(fn: Callable[[], Any], device: torch.device, repeats: int = 15) -> float:
    """The least time of one call of `fn()`; on a GPU by events, so without the host's part."""
    if device.type != "cuda":
        return seconds_per_call(fn, device, repeats, min)
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 3)]
        for event in events:
            event.record()
            fn()
        torch.cuda.synchronize()
        # From event to event. The first two calls warm up; the last has no event after it.
        pairs = list(pairwise(events))[2:]
        return min(start.elapsed_time(end) for start, end in pairs) / 1e3


@torch.inference_mode()
def cores_received(seconds: float = 0.3) -> float:
    """Share of the requested processor time that this process gets; about 1 on an idle machine.

    Matrix products keep every thread of torch busy for `seconds`. If other programs use the same
    cores, the processor time of this process falls behind the clock.
    """
    square = torch.ones(512, 512)
    wall, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        torch.mm(square, square)
    used = time.process_time() - cpu
    return used / (time.perf_counter() - wall) / torch.get_num_threads()


def quiet() -> bool:
    """Whether the cores are free for a measurement; prints a sentence if not.

    On a busy machine it first waits for them, up to about five seconds.
    """
    for _ in range(1 if QUICK else 6):
        share = cores_received()
        if share >= 0.8:
            return True
        time.sleep(0.5)
    print(
        f"Only {share:.0%} of this machine's cores are free: other programs compute at the same "
        "time. The times below will be too long; close those programs and run again."
    )
    return False


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are fast there: on a GPU, or a CPU with instructions for them.

    Without those (AVX-512 on an x86 CPU) PyTorch multiplies number by number.
    """
    return device.type != "cpu" or cpu_products.has_bfloat16()


def _large_matrix(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A matrix that no cache can hold, so that memory is read: 512 MiB, or 2 GiB on a GPU."""
    if device.type == "cuda":
        return torch.randn(1 << 17, 1 << 13, device=device, dtype=dtype)
    return torch.ones(1 << 16, 1 << 11, device=device, dtype=dtype)


def memory_speeds(
    device: torch.device, dtype: torch.dtype, matrix: torch.Tensor | None = None
) -> dict[str, float]:
    """Bytes per second that a copy (read and written), a sum and a matrix-vector product move."""
    matrix = _large_matrix(device, dtype) if matrix is None else matrix
    vector = torch.ones(matrix.shape[1], device=device, dtype=dtype)
    source, target = matrix.chunk(2)
    ways = {
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        "sum": (matrix.sum, matrix.nbytes),
        "matrix-vector": (lambda: matrix @ vector, matrix.nbytes),
    }
    # A call moves half a GB or more, so a few are enough to find an undisturbed one.
    with torch.inference_mode():
        return {
            name: n_bytes / device_seconds(way, device, repeats=7)
            for name, (way, n_bytes) in ways.items()
        }


def read_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes per second that memory delivers: the bound of all that reads it. Takes a second."""
    return max(memory_speeds(device, dtype).values())


def steady(
    work: Callable[[], Result], device: torch.device, dtype: torch.dtype, rounds: int = 2
) -> tuple[list[Result], float]:
    """Results of `work()`, and the `read_bandwidth` at the time.

    Memory that is shared with other users can be twice as fast in one moment as in the next, and a
    time means nothing beside a bound from another moment. So the bandwidth is measured before and
    after each call. Calls repeat until it stayed within 15% during `rounds` of them, at most
    2 · rounds times. Returned are the results at the most usual bandwidth, at least one.
    """
    if QUICK:
        return [work()], read_bandwidth(device, dtype)
    runs, calm = [], []  # (result, the slower of two bandwidths, the faster)
    before = read_bandwidth(device, dtype)
    while len(calm) < rounds and len(runs) < 2 * rounds:
        result, after = work(), read_bandwidth(device, dtype)
        runs.append((result, min(before, after), max(before, after)))
        calm = [run for run in runs if run[1] > 0.85 * run[2]]
        before = after
    runs = calm or runs  # on a machine that never was steady, all of them
    usual = median_high(faster for _, _, faster in runs)  # of two, the faster
    runs = [run for run in runs if 0.85 * usual < run[2] < usual / 0.85]
    return [result for result, _, _ in runs], max(faster for _, _, faster in runs)


def alternate(fns: dict[str, Callable[[], float]], repeats: int) -> Repeats:
    """Call each function twice to warm up, then `repeats` times, taking turns.

    Every other round goes in the opposite order, so that no function always runs first. Each
    function returns its own measurement.
    """
    if QUICK:
        return {name: [fn()] for name, fn in fns.items()}
    results: Repeats = {name: [] for name in fns}
    for i in range(repeats + 2):
        for name in list(fns) if i % 2 else reversed(fns):
            results[name].append(fns[name]())
    return {name: values[2:] for name, values in results.items()}


@torch.inference_mode()
def matmul_peak(device: torch.device, dtype: torch.dtype, repeats: int = 15) -> float:
    """FLOP/s of a large square matrix product; on a CPU with the faster of PyTorch's two libraries.

    Those are MKL, the default in float32, and oneDNN with the layout of `minillm.prepack`.
    """
    n = 8192 if device.type == "cuda" else 2048
    # Random numbers, because a product of zeros draws less power and runs faster.
    square = torch.randn(n, n, device=device).to(dtype)
    products = [partial(torch.mm, square, square)]
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16(device))
    if device.type == "cpu" and torch.backends.mkldnn.is_available() and fast:
        packed = cpu_products.onednn_layout(square, n)
        products.append(partial(cpu_products.onednn_linear, square, packed))
    return 2 * n**3 / min(device_seconds(product, device, repeats) for product in products)


def name_and_memory(device: torch.device) -> tuple[str, int]:
    """The device's name (for a CPU with the number of torch's threads) and its bytes of memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{cpu_name()} ({torch.get_num_threads()} threads)", memory


@torch.inference_mode()
def measure(device: torch.device) -> dict[str, Any]:
    """The fields of a `minillm.Hardware` for this machine, by name. Takes about 5 seconds.

    Three rounds, because a shared machine changes from moment to moment. The peak is the best of
    them. The bandwidth is the middle one: while other users pause, memory is much faster.
    """
    name, memory = name_and_memory(device)
    on_gpu = device.type == "cuda"
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if on_gpu else (torch.float32,)
    rounds = [
        (memory_speeds(device, dtypes[0]), [matmul_peak(device, d, repeats=5) for d in dtypes])
        for _ in range(1 if QUICK else 3)
    ]
    # The middle one of three rounds, as a whole: its copy speed belongs to the same moment.
    in_order = sorted((speeds for speeds, _ in rounds), key=lambda speeds: max(speeds.values()))
    speeds = in_order[len(rounds) // 2]
    peaks = [max(each) for each in zip(*(peaks for _, peaks in rounds), strict=True)]
    return {
        "name": name,
        "memory_bytes": memory,
        "bandwidth": max(speeds.values()),
        "peak_flops": {
            str(d).removeprefix("torch."): p for d, p in zip(dtypes, peaks, strict=True)
        },
        "source": "measured on this machine",
        "copy_bandwidth": speeds["copy"],
    }


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as reported by the system, or "CPU".

    With family and model number where there are any: rented machines often say "AMD EPYC" and no
    more, of generations whose speeds differ several times.
    """
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    first = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = first.get("model name") or platform.processor() or "CPU"
    family, model = first.get("cpu family"), first.get("model")
    return f"{name}, family {family} model {model}" if family and model else name
