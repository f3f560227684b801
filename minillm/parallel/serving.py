"""An engine on several ranks: rank 0 schedules, and the others run the same steps.

Sources: Yu et al. 2022 (Orca), section 4: the scheduler's process tells the workers what each
step holds. vLLM does the same.
Cost: a message of a few hundred bytes to every rank before each step.

Requests arrive at rank 0 only. It sends each step's plan to the other ranks, which have the same
blocks and run the same pass; all other communication is the model's own. So nothing that only rank
0 knows (requests, the clock, draft tokens) can make the ranks diverge. A prompt that is only scored
is sent the same way.
Not here: CUDA graphs, which cannot contain collectives over gloo.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.generation import prompt_logprobs
from minillm.model import Decoder
from minillm.paged import PagedKVCache
from minillm.parallel.collectives import Group, patient_group
from minillm.quantization.kv_cache import storage_for
from minillm.sampling import TokenLogprobs
from minillm.serving.engine import Engine
from minillm.serving.engine_config import EngineConfig
from minillm.serving.model_runner import forward
from minillm.serving.step_plan import StepPlan
from minillm.tools.checks import check_request


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
        with self._together("step", plan.items, plan.copies):
            return super()._forward(plan)

    def score(self, prompt_ids: Sequence[int], n_top: int = 0) -> list[TokenLogprobs]:
        """As the engine's, on all ranks."""
        ids, _ = check_request(self.model.config, prompt_ids, 0, ())  # before the others hear of it
        with self._together("score", ids):
            return super().score(ids, n_top)

    @contextmanager
    def _together(self, *told: object) -> Iterator[None]:
        """Tell the other ranks what the block computes; they compute it at the same time."""
        if self._broken:
            raise RuntimeError("A step has failed on this rank alone; start all ranks again.")
        self._broken = True  # until this pass is complete: the others will complete theirs
        dist.broadcast_object_list([told], 0, group=self._control)
        yield
        self._broken = False

    def __enter__(self) -> "LeadingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        """Let the other ranks return from `shared_engine`; after a failed step they cannot."""
        if not self._broken:
            dist.broadcast_object_list([None], 0, group=self._control)


@torch.inference_mode()
def _follow(model: Decoder, config: EngineConfig, control: dist.ProcessGroup) -> None:
    """Compute what rank 0 sends, until it sends None."""
    storage = storage_for(config.kv_dtype)
    cache = PagedKVCache(
        model, config.n_blocks, config.block_size, backend=config.backend, storage=storage
    )
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, 0, group=control)
        match told[0]:
            case None:
                return
            case "step", items, copies:
                forward(items, copies, model, cache, None)
            case "score", ids:
                prompt_logprobs(model, ids, backend=config.backend)
