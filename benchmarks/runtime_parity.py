"""How exact chunked gradients are: in float64 for every kind of model, in bfloat16 beside a run that is not chunked."""

from __future__ import annotations

import copy
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from runtime_batch import Batch, make_batch, qwen2, run_rows
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.utils import logging

from chunkplan import PlanConfig, build
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import CausalLM, new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.parity import TOLERANCE, compare_plan, write_random_analysis
from chunkplan_runtime.training.optimizer import TrainedWeights

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.runtime.test_parity import MODELS

Row = dict[str, Any]

#: Small enough for hundreds of cases: in chunks of 8 the first is of 3 parts, whose tail may be shared.
_LENGTHS = [19, 2, 4, 5]
_CHUNK_SIZE = 8
_CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": None,
}


def measure_float64(device: torch.device) -> Iterator[Row]:
    """Find the worst ||g - g_ref|| / ||g_ref|| of a parameter, of each family over all ways to cut and run a batch."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "analysis").mkdir()
        analysis = write_random_analysis(folder / "analysis", _LENGTHS, _CONFIG["vocab_size"], seed=0)
        for k, split, mixed in product((1, 2, len(_LENGTHS)), ("full", "even"), (False, True)):
            name = f"K {'N' if k > 2 else k}, split {split}, {'mixed' if mixed else 'packed'}"
            options = PlanConfig(
                chunk_size=_CHUNK_SIZE, k=k, split=split, tail_sharing=mixed, global_batch=len(_LENGTHS)
            )
            build(analysis, folder / "plans" / name, options)
        # One thread each, as these models are small.
        num_processes = os.cpu_count() or 1
        with ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_use_one_thread) as pool:
            yield from pool.map(partial(_measure_family, folder, device), MODELS)


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()


def _measure_family(folder: Path, device: torch.device, family: str) -> Row:
    worst, worst_case, num_cases = -1.0, "", 0
    model = new_model(AutoConfig.for_model(**{**_CONFIG, **MODELS[family]}), torch.float64, 1, device=device)
    for checkpointing in (False, True):
        if checkpointing:
            model.set_checkpointing("full")
        for plan, kv_offload in product(sorted((folder / "plans").iterdir()), (False, True)):
            error = compare_plan(plan, folder / "analysis", model, kv_offload=kv_offload).max_relative_error
            num_cases += 1
            if error > worst:
                worst = error
                worst_case = plan.name + ", offload" * kv_offload + ", checkpointing" * checkpointing
    return {
        "model": family,
        "cases": num_cases,
        "worst error": f"{worst:.1e}",
        "at most 1e-12": "yes" if worst <= TOLERANCE else "NO",
        "worst case": worst_case,
    }


def measure_bfloat16(device: torch.device) -> Iterator[Row]:
    """Measure the error of chunked gradients over that of whole sequences, both in bfloat16, against float64."""
    for seed in range(3):
        config = qwen2(256, 4, vocab_size=512, max_positions=2048)
        batch = make_batch([2048], 256, 1, config.vocab_size, seed)
        model = new_model(config, torch.bfloat16, seed, device=device)
        reference = _float64_gradients(model, config, batch, seed)
        weights = TrainedWeights(model.model, master_weights=True).tensors
        num_targets = batch.work.step.num_target_tokens
        errors, worst = {}, {}
        with _wide_products(device):
            for name in ("chunked", "whole"):
                if name == "chunked":
                    RankExecutor(model).run(batch.work.ranks[0], num_targets)
                else:
                    model.model.set_attn_implementation("sdpa")
                    run_rows(model, batch.rows, num_targets)
                differences = {key: (weight.grad.double() - reference[key]) for key, weight in weights.items()}
                errors[name] = _norm(differences.values()) / _norm(reference.values())
                worst[name] = {
                    key: (difference.norm() / reference[key].norm()).item() for key, difference in differences.items()
                }
                for weight in weights.values():
                    weight.grad = None
        ratios = {key: worst["chunked"][key] / worst["whole"][key] for key in weights}
        least_exact = max(ratios, key=ratios.__getitem__)
        yield {
            "seed": seed,
            "chunked": f"{errors['chunked']:.2e}",
            "whole": f"{errors['whole']:.2e}",
            "chunked / whole": round(errors["chunked"] / errors["whole"], 3),
            "mean of all parameters'": round(math.exp(sum(map(math.log, ratios.values())) / len(ratios)), 3),
            "largest of a parameter": f"{ratios[least_exact]:.2f} ({least_exact})",
        }


def _float64_gradients(model: CausalLM, config: Any, batch: Batch, seed: int) -> dict[str, torch.Tensor]:
    """The gradients in float64 of the whole sequences, with the same weights."""
    # A config of its own: models that share one share its attention.
    model64 = new_model(copy.deepcopy(config), torch.float64, seed, device=model.device)
    model64.model.load_state_dict(model.model.state_dict())
    model64.model.set_attn_implementation("sdpa")
    with evaluate_in_float64(model64.model):
        run_rows(model64, batch.rows, batch.work.step.num_target_tokens)
    return {name: parameter.grad for name, parameter in model64.model.named_parameters()}


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


class _WideProducts(TorchDispatchMode):
    """Products of bfloat16 as a GPU has them, added up in float32 and rounded once: many times as fast on a CPU."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.addmm.default) and args[0].dtype == torch.bfloat16:
            return function(*(tensor.float() for tensor in args), **(kwargs or {})).bfloat16()
        return function(*args, **(kwargs or {}))


@contextmanager
def _wide_products(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        yield
    else:
        with _WideProducts():
            yield
