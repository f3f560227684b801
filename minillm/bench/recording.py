"""Recording a benchmark: every repeat, with hardware, versions and date, written part by part."""

import datetime
import json
import platform
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from minillm import cpu_products
from minillm.measure import Repeats, cpu_name, seconds
from minillm.tools.command_line import first_line
from minillm.tools.folders import data_folder

PACKAGES = ("torch", "triton", "numpy", "transformers", "xllamacpp")


def hardware_label(device: torch.device) -> str:
    """Short name for file names and tables: "nvidia-h200", "cpu-2-threads", or with an ending.

    "-amx" has matrix units (Intel's CPUs since 2023), "-avx2" is an x86 CPU without AVX-512: both
    change what a format costs.
    """
    on_gpu = device.type == "cuda"
    only_avx2 = cpu_products.has_avx2_only()
    ending = " amx" if cpu_products.has_amx() else " avx2" if only_avx2 else ""
    on_cpu = f"cpu {torch.get_num_threads()} threads{ending}"
    name = torch.cuda.get_device_name(device) if on_gpu else on_cpu
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Recording:
    """One benchmark's file, `NAME.HARDWARE.json`; each `add` writes everything known so far.

    So a benchmark that is cut short has recorded the parts it completed. folder: `figures/data/`
    unless given.
    """

    def __init__(
        self, name: str, device: torch.device, settings: dict[str, Any], folder: Path | None = None
    ):
        self.device = device
        self._gaps: dict[str, str] = {}
        label = hardware_label(device)
        on_gpu = device.type == "cuda"
        self.document: dict[str, Any] = {
            "name": name,
            "hardware": {
                "label": label,
                "name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
            },
            "versions": {"python": platform.python_version()}
            | {package: _version(package) for package in PACKAGES},
            "date": datetime.date.today().isoformat(),
            "settings": settings,
            "rows": [],
            "repeats": {},
        }
        self.path = (folder or data_folder()) / f"{name}.{label}.json"

    def gap(self, peer: str, reason: str) -> None:
        """Note that a peer cannot be measured, and why; every later row says so."""
        print(f"  {peer}: {reason}", flush=True)
        self._gaps[peer] = reason
        self.document["gaps"] = dict(self._gaps)
        self._write()

    def add(self, row: dict[str, Any] | None, repeats: Repeats) -> None:
        """Add a part: the row that the README shows, if any, and the raw numbers behind it.

        A row has "what", "value" and "unit", and may have "of_bound", and "against" with a ratio
        for each peer. RuntimeError for more than 100% of a bound: some measurement is wrong.
        """
        if row is not None and row.get("of_bound", 0) > 1:
            raise RuntimeError(
                f"{row['what']}: {row['of_bound']:.1%} of the bound is impossible; the bound or "
                "the time is wrong, and nothing was recorded. Run it again on a quiet machine."
            )
        if row is not None:
            self.document["rows"].append(row | ({"gaps": dict(self._gaps)} if self._gaps else {}))
        self.document["repeats"] |= repeats
        self._write()

    def failed(self, traceback: str) -> None:
        """Note what ended the benchmark before its end."""
        self.document["traceback"] = traceback
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.document)


def record_of(benchmark: str, folder: Path | None = None) -> dict[str, Any]:
    """What a benchmark recorded on a CPU; of several CPUs, the newest record.

    So after `make bench` the lessons show this machine's. folder: `figures/data/` unless given.
    FileNotFoundError if there is no such record.
    """
    folder = folder or data_folder()
    found = [
        json.loads(path.read_text()) for path in sorted(folder.glob(f"{benchmark}.cpu-*.json"))
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no record of the benchmark {benchmark} on a CPU; "
            f"python -m minillm bench {benchmark} makes one."
        )
    return max(found, key=lambda document: document["date"])


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file as a whole: whoever reads it, or stops us, finds the old one or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    new.replace(path)


def kernel_seconds(
    fn: Callable[[], Any], device: torch.device, *, as_graph: bool = False, rep: int = 30
) -> float:
    """Seconds of one call.

    GPU kernels are timed by Triton's own functions: events on the device, caches flushed between
    calls. as_graph: time many calls as one CUDA graph, for kernels so short that otherwise their
    launch would be timed. Caches then stay warm, so `fn` must read more memory than they hold.
    rep: milliseconds to go on for; as a graph, ten times that.
    """
    if device.type != "cuda":
        return seconds(fn, device)
    from triton.testing import do_bench, do_bench_cudagraph

    if as_graph:
        return do_bench_cudagraph(fn, rep=rep, return_mode="median") / 1e3
    return do_bench(fn, warmup=5, rep=rep, return_mode="median") / 1e3


def seconds_in_turn(
    calls: dict[str, Callable[[], Any]], device: torch.device, *, as_graph: bool = False
) -> tuple[Repeats, dict[str, str]]:
    """`kernel_seconds` of each call, twice; and of each call that fails, why.

    All are called once before the first is timed, since compiling takes seconds in which a GPU's
    clocks fall. Then they take turns, the second time in the opposite order, so that none is always
    the one after a pause.
    """
    times: Repeats = {}
    failed: dict[str, str] = {}

    def attempt(name: str, fn: Callable[[], Any]) -> None:
        try:
            seconds(fn, device)  # waits, so that an error is that of this call
        except Exception as error:  # the compiler's or the driver's: go on with the others
            times.pop(name, None)
            failed[name] = first_line(error)

    def once(name: str) -> None:
        took = kernel_seconds(calls[name], device, as_graph=as_graph, rep=15)
        times.setdefault(name, []).append(took)

    if device.type == "cuda":
        for name, call in calls.items():
            attempt(name, call)
    for names in (list(calls), list(reversed(calls)))[: 2 if device.type == "cuda" else 1]:
        for name in names:
            if name not in failed:
                attempt(name, partial(once, name))
    return times, failed


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
