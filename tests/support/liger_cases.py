"""Runs Liger's kernels on a CPU in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.support.liger_cases FILE`.

Prints a line of JSON for each config of the file: what is fused, how far logits and gradients are from those without,
and the bytes of a token that a layer holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import liger_kernel.ops.geglu as geglu
import liger_kernel.ops.rms_norm as rms_norm
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from transformers import AutoConfig

from chunkplan_runtime.models.fused import fuse
from chunkplan_runtime.models.model import new_model
from tests.support.alive import held_bytes


def mend_interpreter() -> None:
    """Numbers are arguments of kernels as tensors, as when these are compiled; CUDA's functions are Triton's own."""
    convert = interpreter._implicit_cvt

    def with_numbers(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_numbers
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)
    geglu.tanh = lambda value: 2 * tl.sigmoid(2 * value) - 1


def gradients_of(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=torch.arange(12)[None], use_cache=False).logits
    logits.square().mean().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return logits.detach(), found


def compare(document: dict[str, Any]) -> dict[str, Any]:
    made = new_model(AutoConfig.for_model(**document), torch.float32, seed=1)
    model = made.model
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    model.config._attn_implementation = "eager"
    logits, gradients = gradients_of(model)
    fused = fuse(model, "liger", torch.device("cpu"))
    others, others_gradients = gradients_of(model)
    model.config._attn_implementation = "chunkplan"
    few, many = (held_bytes(made, num_tokens) * num_tokens for num_tokens in (64, 128))
    errors = [((others_gradients[name] - each).norm() / each.norm()).item() for name, each in gradients.items()]
    return {
        "fused": str(fused),
        "logits": ((others - logits).norm() / logits.norm()).item(),
        "gradients": max(errors),
        "held": (many - few) / 64,  # the interpreter makes weights anew, however many tokens there are
    }


if __name__ == "__main__":
    mend_interpreter()
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(compare(each)), flush=True)
