"""What the tests share: one loaded default model, tiny random models of every family, and the tiers of the kernel tests.

Triton decides when it is imported whether kernels run in its interpreter, so that the tiers are runs of their own:
`pytest -m compile` and `TRITON_INTERPRET=1 pytest -m interpret`. `make test` runs all.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a hub

import pytest
import torch

import minillm
from minillm import Decoder, ModelConfig, Tokenizer
from minillm.attention import BACKENDS

torch.set_num_threads(min(2, os.cpu_count() or 1))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Every backend by name; on a CPU the Triton kernels belong to the interpreter's tier.
BACKEND_PARAMETERS = [pytest.param(name, marks=pytest.mark.interpret) if name == "triton" else name for name in BACKENDS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interpret") and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs Triton's interpreter: TRITON_INTERPRET=1 pytest -m interpret"))
        if item.get_closest_marker("compile") and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs Triton's compiler: pytest -m compile, without TRITON_INTERPRET"))


_run: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and not report.skipped:
        _run.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A tier that was asked for and ran nothing has failed."""
    if session.config.option.markexpr in ("interpret", "compile") and exitstatus == 0 and not _run:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session")
def default() -> tuple[Decoder, Tokenizer]:
    """The default checkpoint in float32 on the CPU, fetched if it is not in the cache."""
    return minillm.load(device="cpu", dtype="float32")


def tiny_config(**changes: object) -> ModelConfig:
    """A decoder small enough to run in milliseconds; H = 4 heads on K = 2, and odd sizes where they are allowed."""
    sizes = dict(n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_head=8, d_ff=40, vocab_size=97, max_seq_len=256)
    return ModelConfig(**(sizes | changes))


@pytest.fixture
def tiny() -> Decoder:
    torch.manual_seed(0)
    return Decoder(tiny_config()).eval()
