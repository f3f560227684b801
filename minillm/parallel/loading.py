"""Sharded loading: a rank reads and keeps only its own part of a checkpoint.

Sources: the safetensors format, whose header says where each tensor's rows lie.
Cost: each of R ranks reads and holds about 1 / R of the weights' bytes, plus a buffer of 16 MiB.

The model is built on PyTorch's meta device, which has shapes but no numbers, and cut there as
`tensor_parallel` and `pipeline_parallel` cut any model. Only this rank's part is then allocated and
read. In a GGUF file columns are cut from rows that have been read.
int8 and int4 are made of whole matrices: for these, each rank reads the whole model and cuts it.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.model import Decoder
from minillm.parallel.collectives import init, inside_torchrun, own_device, wait_for_all
from minillm.parallel.pipeline import Stage, pipeline_parallel
from minillm.parallel.plan import Plan, check_groups, check_size, check_stages, part
from minillm.parallel.tensor import ShardedDecoder, tensor_parallel
from minillm.quantization.quantize import Options
from minillm.tokenizer import Tokenizer
from minillm.tools.devices import device_and_dtype
from minillm.weights.build import Checkpoint, empty_model, empty_on, fill, parameter_sources
from minillm.weights.loading import load, opened


def load_tensor_parallel(
    source: str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    sequence_parallel: bool = False,
) -> tuple[ShardedDecoder, Tokenizer | None]:
    """This rank's part of a checkpoint, as `tensor_parallel` cuts it from a whole model.

    source, device, dtype: as in `minillm.load`; "auto" is this rank's own device. Every rank makes
    the same call, inside torchrun. Errors as in `minillm.load` and `tensor_parallel`.
    """
    if dtype in ("int8", "int4"):
        init()
        own = own_device() if device == "auto" else device
        whole, tokenizer = load(source, device=own, dtype=dtype)
        return tensor_parallel(whole, sequence_parallel=sequence_parallel), tokenizer
    device, dtype = device_and_plain_dtype(device, dtype)
    with opened(source) as (checkpoint, tokenizer):
        model = empty_model(checkpoint, dtype)
        sharded = tensor_parallel(model, sequence_parallel=sequence_parallel)
        plan = Plan(model.config, sharded.group.size, sharded.group.rank)
        _read(checkpoint, sharded, device, plan, first_layer=0)
    wait_for_all()
    return sharded, tokenizer


def load_pipeline(
    source: str | Path | None = None,
    *,
    n_microbatches: int,
    tp: int = 1,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    sequence_parallel: bool = False,
) -> tuple[Stage, Tokenizer | None]:
    """This rank's stage of a checkpoint, as `pipeline_parallel` cuts it from a whole model.

    Other arguments and errors as in `load_tensor_parallel`; ValueError for int8 and int4.
    """
    device, dtype = device_and_plain_dtype(device, dtype)
    with opened(source) as (checkpoint, tokenizer):
        model = empty_model(checkpoint, dtype)
        stage = pipeline_parallel(
            model, n_microbatches=n_microbatches, tp=tp, sequence_parallel=sequence_parallel
        )
        plan = Plan(model.config, tp, stage.tensor_group.rank if stage.tensor_group else 0)
        first = part(len(model.layers), stage.group.size, stage.group.rank).start
        _read(checkpoint, stage.model, device, plan, first)
    wait_for_all()
    return stage, tokenizer


def check_split(
    source: str | Path | None, dtype: str, tp: int, pp: int = 1
) -> tuple[ModelConfig, Tokenizer]:
    """The config and the tokenizer of a checkpoint, which are read before any rank starts.

    ValueError for a dtype that is none, for a model that tp ranks a layer and pp stages cannot
    share, for int4 groups that tp ranks would cut, and for one without a tokenizer.
    """
    if pp > 1:
        device_and_plain_dtype("auto", dtype)
    elif dtype not in ("int8", "int4"):
        device_and_dtype("auto", dtype, beside=("int8", "int4"))
    with opened(source) as (checkpoint, tokenizer):  # reads the config, not the weights
        check_size(checkpoint.config, tp)
        check_stages(checkpoint.config.n_layers, pp)
        if dtype == "int4":
            for matrix in ("out", "down"):
                check_groups(checkpoint.config, tp, matrix, Options.group_size)
    if tokenizer is None:
        raise ValueError("The model's folder has no tokenizer; give a model that has one.")
    return checkpoint.config, tokenizer


def device_and_plain_dtype(
    device: str | torch.device, dtype: str | torch.dtype
) -> tuple[torch.device, torch.dtype]:
    """`device_and_dtype` of `minillm.tools.devices`; "auto" means this rank's own device.

    ValueError for int8 and int4.
    """
    if dtype in ("int8", "int4"):
        raise ValueError(
            f"dtype is {dtype!r}, but shards are read in float32, float16 or bfloat16; load the "
            "whole model with minillm.load, and give it to pipeline_parallel."
        )
    if device == "auto" and inside_torchrun():
        device = own_device()
    return device_and_dtype(device, dtype)


def _read(
    checkpoint: Checkpoint, model: Decoder, device: torch.device, plan: Plan, first_layer: int
) -> None:
    """Allocate and read all that is on the meta device.

    first_layer: the layer of the checkpoint that is the model's layer 0.
    """
    sources = parameter_sources(checkpoint.config)
    read: dict[int, nn.Parameter] = {}  # by the id of the old one: tied matrices are read once
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in read:
                numbers = empty_on(parameter, device)
                _read_one(
                    checkpoint, sources, _origin(f"{path}.{name}", first_layer), numbers, plan
                )
                read[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
            module._parameters[name] = read[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = empty_on(buffer, device)
    model.eval()


def _origin(path: str, first_layer: int) -> str:
    """The parameter's name in the whole model: modules that wrap another call it `inner`."""
    names = [name for name in path.split(".") if name not in ("", "inner")]
    if names[0] == "layers":
        names[1] = str(first_layer + int(names[1]))
    return ".".join(names)


def _read_one(
    checkpoint: Checkpoint, sources: dict, origin: str, numbers: Tensor, plan: Plan
) -> None:
    """Fill `numbers` with this rank's rows or columns of the parameter called `origin`."""
    parts = sources.get(origin) or sources["embed.weight"]  # the head may be tied
    owner, _, kind = origin.rpartition(".")
    matrix = owner.rpartition(".")[2]
    columns = plan.columns(matrix) if kind == "weight" else None
    fill(checkpoint, numbers, parts, plan.rows(matrix), columns)
