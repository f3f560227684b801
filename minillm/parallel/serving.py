"""An engine on several ranks: rank 0 schedules, the others compute what it says.

Sources: Yu et al. 2022 (Orca), section 4: the scheduler's process tells the workers what each
step holds. vLLM does the same.
Cost: a message of some hundred bytes to every rank before each step.

Requests come to rank 0 alone. Each step's plan goes to the others, which have the same blocks, and
run the same pass; its collectives are those of the model. So whatever only rank 0 knows, the
requests, the clock, a drafter's proposals, cannot part the ranks.
Not here: CUDA graphs, whose replay has no room for collectives over gloo.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.parallel.collectives import Group, patient_group
from minillm.quantization.kv_cache import storage_for
from minillm.serving.engine import Engine
from minillm.serving.engine_config import EngineConfig
from minillm.serving.model_runner import forward
from minillm.serving.scheduler import StepPlan


def shared_engine(model: Decoder, config: EngineConfig) -> "LeadingEngine | None":
    """On rank 0 an engine; on the others None, when that engine is closed.

        engine = shared_engine(tensor_parallel(model), EngineConfig(n_blocks=256))
        if engine is not None:
            with engine:
                engine.submit(prompt, 64)
                completions = engine.run()

    model: from `tensor_parallel`, or a stage's. Every rank calls it with the same config, but for
    the drafter, which only rank 0 needs.
    ValueError for cuda_graphs, for a drafter that reads the target's states, and for ranks whose
    models or memory differ.
    """
    if config.cuda_graphs:
        raise ValueError("cuda_graphs is for one rank; leave it off.")
    if config.drafter is not None and config.drafter.uses_states:
        raise ValueError(
            f"A {type(config.drafter).__name__} multiplies with the target's own head, of which "
            "each rank has a part; take a drafter that needs only the tokens."
        )
    names = ("n_blocks", "block_size", "kv_dtype", "backend")
    Group.sharing(model, **{name: getattr(config, name) for name in names})
    control = patient_group()
    if dist.get_rank() == 0:
        return LeadingEngine(model, config, control)
    _follow(model, config, control)
    return None


class LeadingEngine(Engine):
    """Rank 0's engine: it tells the other ranks about each step. Use it in a `with` block."""

    def __init__(self, model: Decoder, config: EngineConfig, control: dist.ProcessGroup):
        super().__init__(model, config)
        self._control, self._broken = control, False

    def _forward(self, plan: StepPlan) -> tuple[Tensor, list[int], Tensor | None]:
        """Tell the others and compute; RuntimeError after a step that failed here alone."""
        if self._broken:
            raise RuntimeError("A step has failed on this rank alone; start all ranks again.")
        self._broken = True  # unless the pass comes to its end, as the others' will
        dist.broadcast_object_list([(plan.items, plan.copies)], 0, group=self._control)
        computed = super()._forward(plan)
        self._broken = False
        return computed

    def __enter__(self) -> "LeadingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        """The other ranks go on after `shared_engine`; after a failed step they wait in vain."""
        if not self._broken:
            dist.broadcast_object_list([None], 0, group=self._control)


@torch.inference_mode()
def _follow(model: Decoder, config: EngineConfig, control: dist.ProcessGroup) -> None:
    storage = storage_for(config.kv_dtype)
    cache = PagedKVCache(
        model, config.n_blocks, config.block_size, backend=config.backend, storage=storage
    )
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, 0, group=control)
        if told[0] is None:
            return
        items, copies = told[0]
        forward(items, copies, model, cache, None)
