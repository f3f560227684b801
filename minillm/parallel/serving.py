"""An engine on several ranks: rank 0 schedules, and the others run the same steps.

Sources: Yu et al. 2022 (Orca), section 4: the scheduler's process tells the workers what each
step holds. vLLM does the same.
Cost: a message of a few hundred bytes to every rank before each step.

Requests arrive at rank 0 only. It sends each step's plan to the other ranks, which have the same
blocks and run the same pass; all other communication is the model's own. So nothing that only rank
0 knows (requests, the clock, draft tokens) can make the ranks diverge.
Not here: CUDA graphs, which cannot contain collectives over gloo.
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
from minillm.serving.step_plan import StepPlan


def shared_engine(model: Decoder, config: EngineConfig) -> "LeadingEngine | None":
    """An engine on rank 0; on the other ranks None, once that engine is closed.

        engine = shared_engine(tensor_parallel(model), EngineConfig(n_blocks=256))
        if engine is not None:
            with engine:
                engine.submit(prompt, 64)
                completions = engine.run()

    model: from `tensor_parallel`, or a stage's. Every rank gives the same config, except for the
    drafter, which only rank 0 needs.
    ValueError for cuda_graphs, for a drafter that reads the target's hidden states, and if models
    or cache sizes differ between ranks.
    """
    if config.cuda_graphs:
        raise ValueError("cuda_graphs is for one rank; leave it off.")
    if config.drafter is not None and config.drafter.uses_states:
        raise ValueError(
            f"A {type(config.drafter).__name__} multiplies with the target's own head, which is "
            "split over the ranks; use a drafter that needs only the tokens."
        )
    # Ranks whose blocks differ would fail later, in the middle of a step.
    Group.sharing(
        model, n_blocks=config.n_blocks, block_size=config.block_size, kv_dtype=config.kv_dtype,
        backend=config.backend,
    )  # fmt: skip
    control = patient_group()
    if dist.get_rank() == 0:
        return LeadingEngine(model, config, control)
    _follow(model, config, control)
    return None


class LeadingEngine(Engine):
    """Rank 0's engine, which sends each step to the other ranks. Use it in a `with` block."""

    def __init__(self, model: Decoder, config: EngineConfig, control: dist.ProcessGroup):
        super().__init__(model, config)
        self._control, self._broken = control, False

    def _forward(self, plan: StepPlan) -> tuple[Tensor, list[int], Tensor | None]:
        """Send the step and compute it; RuntimeError once a step has failed on this rank alone."""
        if self._broken:
            raise RuntimeError("A step has failed on this rank alone; start all ranks again.")
        self._broken = True  # until this pass is complete: the others will complete theirs
        dist.broadcast_object_list([(plan.items, plan.copies)], 0, group=self._control)
        computed = super()._forward(plan)
        self._broken = False
        return computed

    def __enter__(self) -> "LeadingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the other ranks return from `shared_engine`; after a failed step they cannot."""
        if not self._broken:
            dist.broadcast_object_list([None], 0, group=self._control)


@torch.inference_mode()
def _follow(model: Decoder, config: EngineConfig, control: dist.ProcessGroup) -> None:
    """Run the steps that rank 0 sends, until it sends None."""
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
