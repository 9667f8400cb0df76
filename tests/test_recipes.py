"""Each recipe has the options of `build` and `train` for a model whose shape is shipped: it is planned, and fits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chunkplan.cost.model_config import find_config
from chunkplan.options import options_of, read_entries
from chunkplan_runtime.train import read_options
from chunkplan_runtime.training.config import TrainConfig
from tests.support.command_line import Run
from tests.support.places import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

#: Sequences of a step or two, a few of them as long as the recipes are for.
LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(7.0, 1.2, 128)), 16, 32_768).astype(np.int64)
LENGTHS[:4] = 32_768


def test_there_are_recipes_for_six_models() -> None:
    assert len({read_entries(path, "build")["model"] for path in RECIPES}) == len(RECIPES) == 6


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_planned_as_its_model_takes_it_and_fits(
    recipe: Path, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned, trained = read_entries(recipe, "build"), read_entries(recipe, "train")
    most = find_config(planned["model"])[0]["max_position_embeddings"]
    np.save("lengths.npy", np.minimum(LENGTHS, most))
    ran = command("build", "lengths.npy", "--config", str(recipe), "--json")
    assert ran.code == 0 and "warning: " not in ran.err, ran.err
    built = json.loads(ran.out)
    assert built["memory"]["fits"]
    cost = built["manifest"]["predictions"]["cost_model"]
    assert built["manifest"]["config"]["dp"] == planned.get("dp", 1)
    assert (cost["checkpointing"], cost["lora_rank"] if "lora-rank" in planned else 0) == (
        planned["checkpointing"],
        planned.get("lora-rank", 0),
    )
    config = read_options(["--config", str(recipe), "--plan", "chunkplan-out/plan", "--output", "run"])
    assert config.model == planned["model"] == trained["model"]
    assert config.highest_lr == (2e-4 if "lora-rank" in planned else 1e-5)
    by_default = {name: one.default for name, one in options_of(TrainConfig).items()}
    assert (config.lr_schedule, config.warmup) == (by_default["lr_schedule"], by_default["warmup"])


def test_the_command_line_wins_over_a_recipe_and_errors_name_its_model(
    tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `tune` is to find instead is found for the model and the hardware of the file."""
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS)
    recipe = str(ROOT / "recipes" / "qwen2.5-7b.yaml")
    ran = command("build", "lengths.npy", "--config", recipe, "--dp", "2", "--hardware", "rtx4090", "--json", width=400)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["manifest"]["predictions"]["cost_model"]["hardware"]["name"] == "rtx4090"
    assert "--model Qwen/Qwen2.5-7B" in ran.err and "--hardware rtx4090" in ran.err
