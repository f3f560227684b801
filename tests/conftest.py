"""What pytest needs for all tests: threads, tiers that must not be empty, the default model."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a hub

import pytest
import torch
from models import tiny_config
from tiers import HAS_TRITON, INTERPRETED

import minillm
from minillm import Decoder, Tokenizer

# jsonschema builds this grammar of web addresses, for seconds, whenever a notebook is to be read.
sys.modules.setdefault("rfc3987_syntax", None)
# Workers side by side, a thread each: more threads than cores slow each other down many times.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))

_SKIPS = (  # marker, when its tests are skipped, and why
    ("interpret", not HAS_TRITON, "needs the package triton, which exists for Linux"),
    ("compile", not HAS_TRITON, "needs the package triton, which exists for Linux"),
    ("interpret", not INTERPRETED, "needs TRITON_INTERPRET=1 pytest -m interpret"),
    ("compile", INTERPRETED, "needs the compiler: pytest -m compile, without TRITON_INTERPRET"),
)
# Files of many seconds, and those that ask other libraries, whose import alone takes seconds;
# `make check` leaves them out, like every test of the default checkpoint.
_SLOW_FILES = {
    "test_bench.py", "test_config.py", "test_costs.py", "test_flash.py", "test_gguf_formats.py",
    "test_gguf_metadata.py", "test_gpu_bench.py", "test_gqa.py", "test_hostile.py",
    "test_interrupts.py", "test_quantize_oracles.py", "test_serve.py", "test_site.py",
    "test_special_tokens.py", "test_student.py", "test_tokenizer.py", "test_trained_student.py",
    "test_untrusted.py", "test_vocabulary.py", "test_weights.py",
}  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has no test of the tier is not even imported: all together take half a minute."""
    asked, path = config.option.markexpr, collection_path
    if "not slow" in asked and path.name in _SLOW_FILES:
        return True
    if asked in ("interpret", "compile") and path.suffix == ".py" and asked not in path.read_text():
        return True
    return None  # as pytest itself decides


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the kernel tests that cannot run here, with the reason; mark the slow ones."""
    for item in items:
        if item.path.name in _SLOW_FILES or "default" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        for marker, skipped, reason in _SKIPS:
            if skipped and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


_ran: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was run and not skipped."""
    if report.when == "call" and not report.skipped:
        _ran.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A tier that was asked for, could run here and ran nothing has failed."""
    asked = session.config.option.markexpr in ("interpret", "compile")
    controller = "PYTEST_XDIST_WORKER" not in os.environ
    if asked and HAS_TRITON and controller and exitstatus == 0 and not _ran:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session")
def default() -> tuple[Decoder, Tokenizer]:
    """The default checkpoint in float32 on the CPU, fetched if it is not in the cache."""
    return minillm.load(device="cpu", dtype="float32")


@pytest.fixture
def tiny() -> Decoder:
    """A tiny random model."""
    torch.manual_seed(0)
    return Decoder(tiny_config()).eval()
