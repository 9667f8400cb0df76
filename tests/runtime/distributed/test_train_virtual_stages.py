"""A run on virtual stages is the run of one process: losses, norms, evaluations, checkpoints, the model it leaves."""

from __future__ import annotations

import json
import shutil

import pytest

from chunkplan import PlanConfig, build
from chunkplan.planfile.load import load_held_out, load_plan
from chunkplan_runtime.train import main
from tests.runtime.distributed.test_train import kill_and_go_on, options
from tests.support.analyses import write_analysis
from tests.support.training_cases import all_well, together
from tests.support.training_checks import learning, same_run, same_weights

PLANS = {
    "one": {},
    "virtual": {"pp": 2, "schedule": "interleaved"},
    "both": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "long": {"pp": 2, "schedule": "interleaved", "epochs": 40},
    "1f1b": {"pp": 2},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    folder = tmp_path_factory.mktemp("virtual")
    write_analysis(folder / "analysis", random_sequences([25, 6, 14, 40, 3, 9], seed=4))
    for name, changes in PLANS.items():
        settings = {"chunk_size": 8, "k": 2, "global_batch": 4, "epochs": 6, "holdout": 2, "cp": "off", **changes}
        build(folder / "analysis", folder / name, PlanConfig(**settings))
    tied = tiny_config("qwen2", tie_word_embeddings=True, num_hidden_layers=5)
    (folder / "config.json").write_text(json.dumps(tied))
    return folder


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plan", "size", "more"),
    [
        ("virtual", 2, ("--checkpointing", "keep-products")),
        pytest.param("both", 4, ("--kv-offload", "--stage-layers", "1,2,1,1"), marks=pytest.mark.soak),
        pytest.param("both", 2, (), marks=pytest.mark.soak),
    ],
)
def test_a_run_on_virtual_stages_is_that_of_one_process_and_goes_on_bit_for_bit(
    made, tmp_path, trainers, plan, size, more
):
    how = ("--precision", "fp64", "--save-every", 2, "--keep-last", 9, "--eval-every", 2, "--max-steps", 4)
    assert main(options(made, tmp_path / "one", *how, plan="one")) == 0
    arguments = options(made, tmp_path / "run", *how, *more, plan=plan)
    assert "2 pipeline stages of 2 virtual stages)" in all_well(trainers, size, arguments)
    same_run(tmp_path / "one", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "measured.json").read_text())["processes"]
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "final")
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)
    assert "resumed   at step 2" in all_well(trainers, size, [*arguments, "--resume"])
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_an_evaluation_plan_for_other_virtual_stages_is_refused(made, tmp_path, trainers):
    held_out = load_held_out(load_plan(made / "1f1b"))
    assert held_out is not None
    told = together(trainers, 2, options(made, tmp_path / "run", "--eval-plan", held_out.path, plan="virtual"))
    assert [code for code, _ in told] == [2, 2]
    [said] = [text for _, text in told if text]
    assert f"the evaluation plan {held_out.path} is for other virtual stages than {made / 'virtual'}" in said


@pytest.mark.soak
def test_a_process_with_virtual_stages_that_is_killed_is_named_and_the_run_goes_on(made, tmp_path, trainers):
    kill_and_go_on(made, tmp_path, trainers)
