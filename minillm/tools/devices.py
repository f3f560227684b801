"""Where to compute, and in which floating-point format."""

import torch

from minillm.tools.checks import brief

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)}


def device_and_dtype(
    device: str | torch.device, dtype: str | torch.dtype, *, beside: tuple[str, ...] = ()
) -> tuple[torch.device, torch.dtype]:
    """Both with "auto" resolved; ValueError in one sentence for what this machine does not have.

    "auto" is CUDA if available, else the CPU; bfloat16 on CUDA, else float32.
    beside: what else the caller takes for a dtype, for the message.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type != "cuda":
            # The "meta" device has shapes but no numbers, so that .item() fails on it.
            torch.zeros(1, device=chosen).item()
    except Exception as error:  # torch raises many types for a device it was not built for
        raise ValueError(
            f"device {brief(str(device))} is not known or not usable here; give auto, cpu, cuda "
            "or cuda:N."
        ) from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {chosen} was requested, but this machine has {torch.cuda.device_count()} CUDA "
            "devices; use device='cpu'."
        )
    if dtype == "auto":
        dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    dtype = _DTYPES.get(str(dtype).removeprefix("torch."), dtype)
    if dtype not in _DTYPES.values():
        possible = ", ".join(("auto", *_DTYPES, *beside))
        raise ValueError(f"dtype {brief(dtype)} is not possible; choose one of {possible}.")
    return chosen, dtype
