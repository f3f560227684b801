"""The roofline's arithmetic, the presets, and one measurement of this machine."""

import math

import pytest
import torch

from minillm import Hardware, measure
from minillm.hardware import PRESETS, roofline_seconds
from minillm.measure import cpu_name, seconds_per_call

PEAKS = {"float32": 1000.0, "float16": 4000.0}
CHIP = Hardware("chip", 10**9, bandwidth=100.0, peak_flops=PEAKS, source="the test")


def test_roofline_takes_the_longer_of_arithmetic_and_memory():
    assert roofline_seconds(CHIP, 5000, 100, "float32") == 5.0
    assert roofline_seconds(CHIP, 5000, 700, "float32") == 7.0
    assert roofline_seconds(CHIP, 5000, 100, torch.float16) == 1.25
    assert roofline_seconds(CHIP, 0, 0, "float32") == 0


@pytest.mark.parametrize(
    ("chip", "dtype"), [(chip, dtype) for chip in PRESETS.values() for dtype in chip.peak_flops]
)
def test_ridge_point_is_where_the_two_cross(chip, dtype):
    ridge, n_bytes = chip.ridge_point(dtype), 1e9
    memory = n_bytes / chip.bandwidth
    assert roofline_seconds(chip, ridge * n_bytes, n_bytes, dtype) == pytest.approx(memory)
    assert roofline_seconds(chip, 0.5 * ridge * n_bytes, n_bytes, dtype) == memory
    assert roofline_seconds(chip, 2 * ridge * n_bytes, n_bytes, dtype) == pytest.approx(2 * memory)


@pytest.mark.parametrize(
    ("name", "dtype", "ridge"),
    [
        ("v100", "float16", 138.9),
        ("a100-40gb", "bfloat16", 200.6),
        ("a100-80gb", "bfloat16", 153.0),
        ("h100", "bfloat16", 295.4),
        ("h200", "float8", 412.3),
        ("l4", "float16", 403.3),
        ("t4", "int8", 406.2),
        ("rtx-4090", "bfloat16", 163.9),
        ("m1-ultra", "float32", 26.2),
        ("epyc-9654", "float32", 16.0),
    ],
)
def test_ridge_points_of_presets(name, dtype, ridge):
    assert Hardware.preset(name).ridge_point(dtype) == pytest.approx(ridge, abs=0.06)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete(name):
    chip = Hardware.preset(name)
    assert chip.name == name and len(chip.source) > 10 and chip.copy_bandwidth is None
    assert type(chip.memory_bytes) is int and 16e9 <= chip.memory_bytes <= 1e12
    assert 100e9 < chip.bandwidth < 10e12
    assert all(1e12 < peak < 1e16 for peak in chip.peak_flops.values())
    # Fewer bits are never slower.
    assert chip.peak_flops["float32"] == min(chip.peak_flops.values())


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"no hardware preset 'h1000'; choose one of v100, .*h100"):
        Hardware.preset("h1000")
    message = r"v100 has no bfloat16 peak; known are float32, float16\."
    with pytest.raises(ValueError, match=message):
        Hardware.preset("v100").ridge_point(torch.bfloat16)
    with pytest.raises(ValueError, match="chip has no int8 peak"):
        roofline_seconds(CHIP, 1, 1, "int8")


@pytest.mark.parametrize(
    "rounds, speeds, results, bandwidth",
    [
        (2, [5.0, 5.1, 5.0], [1, 2], 5.1),  # steady
        (2, [5.0, 9.0, 5.0, 5.1, 5.2], [3, 4], 5.2),  # the first two saw it change
        (2, [5.0, 5.1, 9.0, 9.1], [3], 9.1),  # slow, between, fast: of two the fast one counts
        (2, [5.0, 9.0, 5.0, 9.0, 5.0], [1, 2, 3, 4], 9.0),  # never steady
        (3, [9.0, 9.1, 5.0, 5.1, 5.2], [3, 4], 5.2),  # of three the usual ones count
    ],
)
def test_steady_keeps_what_saw_one_bandwidth(monkeypatch, rounds, speeds, results, bandwidth):
    measured, calls = iter(speeds), iter(range(1, 99))
    monkeypatch.setattr(measure, "read_bandwidth", lambda *_: next(measured))
    cpu = torch.device("cpu")
    found = measure.steady(lambda: next(calls), cpu, torch.float32, rounds)
    assert found == (results, bandwidth)
    assert not list(measured)


def test_a_machine_has_its_middle_bandwidth_and_its_best_peak(monkeypatch):
    memory = iter([{"copy": 2.0, "sum": 9.0}, {"copy": 4.0, "sum": 3.0}, {"copy": 5.0, "sum": 6.0}])
    peaks = iter([100.0, 300.0, 200.0])
    monkeypatch.setattr(measure, "memory_speeds", lambda *_: next(memory))
    monkeypatch.setattr(measure, "matmul_peak", lambda *_, repeats: next(peaks))
    found = measure.measure(torch.device("cpu"))
    assert (found["bandwidth"], found["copy_bandwidth"]) == (6.0, 5.0)
    assert found["peak_flops"] == {"float32": 300.0}


@pytest.mark.slow
def test_measuring_this_machine(monkeypatch):
    """Everything once, as in the lessons' tests, which only makes the figures less exact."""
    monkeypatch.setattr(measure, "QUICK", True)
    measured = Hardware.measure("cpu")
    values = [measured.bandwidth, measured.copy_bandwidth, *measured.peak_flops.values()]
    assert all(type(x) is float and math.isfinite(x) and 1e8 < x < 1e16 for x in values)
    assert 2**28 < measured.memory_bytes < 2**50
    assert set(measured.peak_flops) == {"float32"}
    assert measured.name.startswith(cpu_name()) and measured.source == "measured on this machine"
    # Its roofline: a product of large matrices does more arithmetic per byte than any CPU needs, a
    # matrix-vector product less.
    assert roofline_seconds(measured, 1e12, 1e6, "float32") == 1e12 / measured.peak("float32")
    assert roofline_seconds(measured, 1e6, 1e12, torch.float32) == 1e12 / measured.bandwidth


def test_quick_measures_call_once(monkeypatch):
    monkeypatch.setattr(measure, "QUICK", True)
    monkeypatch.setattr(measure, "read_bandwidth", lambda *_: 2.0)
    calls, cpu = [], torch.device("cpu")
    assert seconds_per_call(lambda: calls.append("per call"), cpu) >= 0
    assert measure.alternate({"one": lambda: calls.append("alternate") or 1.0}, 9) == {"one": [1.0]}
    assert measure.steady(lambda: calls.append("steady"), cpu, torch.float32) == ([None], 2.0)
    assert calls == ["per call", "alternate", "steady"]


def test_the_name_of_a_processor_tells_generations_apart(tmp_path):
    info = tmp_path / "cpuinfo"
    first = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    info.write_text(f"{first}\n{first.replace('17', '1')}")
    assert cpu_name(info) == "AMD EPYC, family 25 model 17"
    info.write_text("processor\t: 0\nBogoMIPS\t: 100.00\n")  # as on Arm
    assert cpu_name(info) == cpu_name(tmp_path / "none") != ""
