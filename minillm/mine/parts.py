"""The parts that a reader builds in the lessons: which lesson, which functions, what for."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from minillm.mine import checks


@dataclass(frozen=True)
class Part:
    """One file of the reader's folder.

    names: what `keep` is called with, in this order. use: what it is for in a server.
    """

    lesson: str
    file: str
    names: tuple[str, ...]
    use: str
    check: Callable[[ModuleType], None]


PARTS = (
    Part("00", "greedy_loop", ("answer_greedily",), "the loop that answers", checks.greedy_loop),
    Part("01", "decoder", ("my_decoder",), "the model that it runs", checks.decoder),
    Part("02", "predictor", ("step_seconds",), "the least time of a step", checks.predictor),
    Part("03", "cache", ("MyCache",), "the cache of one request", checks.cache),
    Part("04", "grouped_attention", ("grouped",), "how it attends", checks.grouped_attention),
    Part("05", "kernel", ("heads",), "attention on a GPU", checks.kernel),
    Part(
        "06", "allocator", ("CountingPool", "slots_of", "room_for_next"),
        "where each token of many requests lies", checks.allocator,
    ),
    Part("07", "scheduler", ("plan_step",), "who computes what in a step", checks.scheduler),
    Part("08", "metrics", ("stamps_to_metrics",), "what its users feel", checks.metrics),
    Part("08", "admission", ("admit",), "whom it lets in", checks.admission),
    Part("09", "packer", ("store", "multiply"), "matrices in four bits", checks.packer),
    Part(
        "10", "sparsity", ("wanda_mask", "pack_places", "sparse_product"),
        "matrices of which half is zero", checks.sparsity,
    ),
    Part("11", "loss", ("masked_loss",), "how its drafting model was trained", checks.loss),
    Part("12", "accept_rule", ("accept",), "which guesses stand", checks.accept_rule),
    Part("12", "drafter", ("look_up",), "guesses from the text itself", checks.drafter),
    Part(
        "13", "parallel_linears", ("column_linear", "row_linear"),
        "matrices on several devices", checks.parallel_linears,
    ),
)  # fmt: skip
"""All parts, in the order of the lessons."""
