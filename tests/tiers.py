"""The tiers of the kernel tests.

Triton decides when it is imported whether kernels run in its interpreter, so the tiers are runs of
their own: `pytest -m compile` and `TRITON_INTERPRET=1 pytest -m interpret`.
"""

import importlib.util
import os

import pytest

from minillm.layers.attention import BACKENDS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Every backend by name; on a CPU the Triton kernels belong to the interpreter's tier.
BACKEND_PARAMETERS = [
    pytest.param(name, marks=pytest.mark.interpret) if name == "triton" else name
    for name in BACKENDS
]
