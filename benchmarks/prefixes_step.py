"""Measures a step of rollouts of one prompt with and without the prompt shared, side by side in one run.

    python benchmarks/prefixes_step.py           # 4, 8 and 16 rollouts: 5 minutes
    python benchmarks/prefixes_step.py --toy     # of short ones

The loss is cross-entropy, and one of log-probabilities, for which all chunks run forward once more. Both ways are run
in turn; times are of the processor, the least of each, and gradients are compared.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from planning import print_table
from runtime_batch import qwen2

from chunkplan import PlanConfig, build
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan_runtime.execution.step_loss import StepLoss
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.training.executor import Executor

Row = dict[str, Any]

#: Ways a step is run, and how often each.
_WAYS, _REPEATS = {"apart": False, "shared": True}, 3


def measure_step(prompt: int, answer: int, rollouts: int, chunk_size: int, loss: StepLoss | None = None) -> Row:
    """A row of tokens and seconds of a step of `rollouts` answers to one prompt, in tokens each.

    Without a `loss` of log-probabilities it is cross-entropy. "predicted" is by the cost model for Qwen2.5-7B.
    """
    executor = Executor(new_model(qwen2(256, 4, 512, prompt + answer), torch.float32, 0))
    with tempfile.TemporaryDirectory() as folder:
        analysis = _write_rollouts(Path(folder) / "analysis", prompt, answer, rollouts)
        steps, predicted, run_tokens = {}, {}, {}
        for way, shares in _WAYS.items():
            config = PlanConfig(chunk_size=chunk_size, k=1, global_batch=rollouts, share_prefixes=shares, cp="off")
            plan = build(analysis, Path(folder) / way, config)
            steps[way] = next(iter(executor.stream(plan.path)))
            predicted[way] = steps[way].step.predicted_us
            run_tokens[way] = sum(chunk.num_tokens for chunk in steps[way].step.chunks[0])
        seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
        weights = [each for each in executor._model.model.parameters() if each.requires_grad]
        gradients: dict[str, torch.Tensor] = {}
        for _ in range(_REPEATS):
            for way, work in steps.items():
                executor._model.model.zero_grad()
                started = time.process_time()
                executor.step(work, loss)
                seconds[way].append(time.process_time() - started)
                gradients[way] = torch.cat([each.grad.flatten() for each in weights if each.grad is not None])
    apart, shared = (min(seconds[way]) for way in _WAYS)
    difference = gradients["shared"] - gradients["apart"]
    return {
        "prompt": prompt,
        "answer": answer,
        "rollouts": rollouts,
        "loss": "SFT" if loss is None else "of log-probabilities",
        "tokens apart": run_tokens["apart"],
        "tokens shared": run_tokens["shared"],
        "fewer tokens": f"{run_tokens['apart'] / run_tokens['shared']:.2f}",
        "CPU s apart": round(apart, 2),
        "CPU s shared": round(shared, 2),
        "faster": f"{apart / shared:.2f}",
        "predicted": f"{predicted['apart'] / predicted['shared']:.2f}",
        "gradients differ by": f"{float(difference.norm() / gradients['apart'].norm()):.0e}",
    }


def of_log_probs(tokens: Any) -> torch.Tensor:
    """A loss of sequences, as that of a policy gradient."""
    advantages = torch.linspace(-1, 1, len(tokens.sequence_ids)).to(tokens.log_probs)
    value: torch.Tensor = -(advantages * tokens.sums(tokens.log_probs)).sum() / len(tokens.log_probs)
    return value


def _write_rollouts(folder: Path, prompt: int, answer: int, rollouts: int) -> Path:
    folder.mkdir()
    random, writer = np.random.default_rng(0), AnalysisWriter(folder)
    shared = random.integers(0, 512, prompt, np.int32)
    for record in range(rollouts):
        ids = np.concatenate([shared, random.integers(0, 512, answer, np.int32)])
        writer.add(0, record, ids, np.arange(len(ids)) >= prompt)
    writer.finish(exact=True, sources=[])
    return folder


def measure(prompt: int, answer: int, counts: tuple[int, ...], chunk_size: int) -> Iterator[Row]:
    """Rows of all numbers of rollouts, with both losses."""
    for rollouts in counts:
        for loss in (None, of_log_probs):
            yield measure_step(prompt, answer, rollouts, chunk_size, loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    toy = parser.parse_args().toy
    print(machine("torch"))
    rows = measure(128, 32, (4,), 64) if toy else measure(2048, 256, (4, 8, 16), 1024)
    print_table("A step with and without a shared prompt, four layers of width 256, K 1", rows)
