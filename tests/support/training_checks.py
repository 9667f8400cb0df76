"""What tests of training share: a folder to train in, command lines, and what a run leaves behind without its times."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chunkplan import CostModel, PlanConfig, build, load_hardware, read_model_config
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan_runtime.devices import calibrated_name, device_name
from chunkplan_runtime.training.screen import Screen

SOURCES = ("short.jsonl", "long.jsonl")

#: What two runs of the same may differ in.
TIMES = {"seconds", "predicted_seconds", "tokens_per_second", "mfu", "wait_seconds", "peak_memory_bytes", "processes"}


def cost_of_a_run(model: Path) -> CostModel:
    """What a plan is timed with to be compared with a run of `model`, its folder, on this CPU: rates are an H100's."""
    here = replace(load_hardware("h100"), name=calibrated_name("here", device_name(torch.device("cpu"))))
    return CostModel(shape=read_model_config(model), hardware=here, precision="fp32")


#: Plans: 12 steps, 40, on three ranks, two stages, held out.
PLANS: dict[str, dict[str, Any]] = {
    "plan": {"epochs": 6},
    "forty": {"epochs": 20, "chunk_size": 16},
    "dp": {"epochs": 6, "dp": 3},
    "pp": {"pp": 2},
    "held": {"epochs": 3, "holdout": 2},
}


def make_training(folder: Path, tiny_config: Callable[..., Any], random_sequences: Callable[..., Any]) -> Path:
    """An analysis of two sources, a config.json, and `PLANS`."""
    (folder / "analysis").mkdir(parents=True)
    writer = AnalysisWriter(folder / "analysis")
    for record, (ids, target) in enumerate(random_sequences([25, 6, 14, 40, 3, 9], seed=4)):
        writer.add(int(len(ids) > 10), record, ids.astype(np.int32), target)
    writer.finish(exact=True, sources=[{"path": path, "records": 6, "schema": None} for path in SOURCES])
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2")))
    cost = cost_of_a_run(folder)
    for name, options in PLANS.items():
        config = PlanConfig(**{"chunk_size": 8, "k": 2, "global_batch": 3, "cp": "off", **options})
        build(folder / "analysis", folder / name, config, cost=cost)
    return folder


def options(made: Path, output: Path, *more: object, plan: str = "plan") -> list[str]:
    """A command line that trains a new model, always at the same rate; later options win."""
    return [
        *("--plan", str(made / plan), "--model-config", str(made / "config.json")),
        *("--output", str(output), "--lr", "3e-3", "--lr-schedule", "constant", "--warmup", "0", *map(str, more)),
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def learning(output: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    return [
        {name: value for name, value in row.items() if name not in TIMES} for row in lines(output / "metrics.jsonl")
    ]


def same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same safetensors, bit for bit."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files and files == sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    for name in files:
        mine, others = load_file(one / name), load_file(other / name)
        if mine.keys() != others.keys() or not all(bool((mine[key] == others[key]).all()) for key in mine):
            return False
    return True


def same_run(one: Path, other: Path, tolerance: float = 1e-12) -> None:
    """Losses, norms and evaluations agree, and so do the weights of final/."""
    assert len(learning(one)) == len(learning(other)) > 0
    for row, expected in zip(learning(one), learning(other), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
        assert row["source_losses"] == pytest.approx(expected["source_losses"], rel=tolerance)
    for row, expected in zip(lines(one / "evals.jsonl"), lines(other / "evals.jsonl"), strict=True):
        assert row["eval_loss"] == pytest.approx(expected["eval_loss"], rel=tolerance)
    [file] = (path.name for path in (one / "final").glob("*.safetensors"))
    weights, expected_weights = load_file(one / "final" / file), load_file(other / "final" / file)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e3 * tolerance, atol=1e3 * tolerance)


def hidden_files(folder: Path) -> list[Path]:
    """Whatever was meant to be temporary."""
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


def command(arguments: list[str], *launcher: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [*launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def after_step(monkeypatch: Any, step: int, action: Callable[[], object]) -> None:
    """Have `action` happen once the line of `step` is shown, of runs in this process."""
    show = Screen.show_step

    def show_and_act(screen: Screen, row: dict[str, Any]) -> None:
        show(screen, row)
        if row["step"] == step:
            action()

    monkeypatch.setattr(Screen, "show_step", show_and_act)
