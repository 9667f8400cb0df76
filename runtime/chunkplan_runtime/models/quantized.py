"""Frozen weights in 4 bits (QLoRA, Dettmers et al., arXiv 2305.14314) by bitsandbytes, as transformers loads them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from chunkplan.errors import UsageError
from chunkplan.extras import pip_install

_NARROWEST, _WIDEST = torch.float16.itemsize, torch.float32.itemsize


def in_4bit(dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """What `from_pretrained` takes to load matrices of layers in 4 bits onto `device` that compute in `dtype`.

    They are NF4, and their scales are quantized again, as the planner counts them.

    Raises:
        UsageError: what that takes is not installed, or cannot compute in `dtype`.
    """
    try:
        for package in ("accelerate", "bitsandbytes"):
            import_module(package)
    except ImportError as error:
        raise UsageError(
            f"weights in 4 bits need bitsandbytes and accelerate ({error})", hint=pip_install("qlora")
        ) from error
    if not _NARROWEST <= dtype.itemsize <= _WIDEST:
        raise UsageError(
            f"bitsandbytes does not compute in {str(dtype).removeprefix('torch.')}", hint="use --precision bf16 or fp32"
        )
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def is_quantized(parameter: Any) -> bool:
    """Whether it holds weights in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: Any) -> int:
    """How many weights a parameter is, of which one that is quantized has two in a byte."""
    return torch.Size(parameter.quant_state.shape).numel() if is_quantized(parameter) else int(parameter.numel())
