"""Runs with losses by name: in `chunkplan train` and `ChunkTrainer`, with references from scores and adapters."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import PlanConfig, build, load_analysis, load_plan
from chunkplan.errors import DataError
from chunkplan_runtime import Executor
from chunkplan_runtime.execution.losses import dpo
from chunkplan_runtime.feed.samples import SampleReader
from chunkplan_runtime.feed.scores import Scores
from chunkplan_runtime.train import main
from tests.support.hf_cases import chunk_trainer_here, with_adapters
from tests.support.loss_cases import LENGTHS, write_samples
from tests.support.ports import free_port
from tests.support.step_loss_cases import gradients_of
from tests.support.training_cases import all_well
from tests.support.training_checks import learning, lines


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    """A saved model, and plans of four steps of pairs and of rollouts; pairs have their model's own scores."""
    folder = tmp_path_factory.mktemp("losses")
    torch.manual_seed(3)
    config = AutoConfig.for_model(**tiny_config("qwen2", num_hidden_layers=2))
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder / "model")
    for name in ("dpo", "ppo"):
        write_samples(folder / name / "analysis", name, random_sequences(LENGTHS, seed=4))
        for plan, how in {"one": {}, "two": {"dp": 2}, "stages": {"pp": 2}}.items():
            settings = {"chunk_size": 8, "k": 2, "global_batch": len(LENGTHS), "epochs": 4, "cp": "off", **how}
            build(folder / name / "analysis", folder / name / plan, PlanConfig(**settings))
    scoring = options(folder, folder / "scores")[:-4]
    assert main(scoring, scores=True) == 0
    return folder


def options(made, output, *more, plan="dpo/one"):
    where = ["--plan", made / plan, "--model", made / "model", "--output", output, "--device", "cpu"]
    learning = ["--lr", "1e-2", "--warmup", "0"]
    return [*map(str, (*where, "--precision", "fp64", *more, *learning))]


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """A run of DPO against the model that it begins with."""
    output = tmp_path_factory.mktemp("trained") / "run"
    more = ("--loss", "dpo", "--loss-options", "beta=0.3", "--reference", made / "scores", "--save-every", 2)
    assert main(options(made, output, *more)) == 0
    return output


def test_a_run_begins_at_no_preference_and_learns_one(trained):
    rows = lines(trained / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)  # scores are in float32
    assert rows[0]["loss_metrics"]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and rows[-1]["loss_metrics"]["rewards/accuracies"] == 1


@pytest.mark.parametrize("plan", ["two", pytest.param("stages", marks=pytest.mark.soak)])
def test_several_processes_are_the_run_of_one(made, trained, trainers, tmp_path, plan):
    more = ("--loss", "dpo", "--loss-options", "beta=0.3", "--reference", made / "scores")
    all_well(trainers, 2, options(made, tmp_path / "run", *more, plan=f"dpo/{plan}"))
    for row, expected in zip(learning(tmp_path / "run"), learning(trained), strict=True):
        for name in ("loss", "grad_norm", "loss_metrics"):
            assert row[name] == pytest.approx(expected[name], rel=1e-10, abs=1e-12)


def test_chunk_trainer_is_that_run_and_logs_the_metrics(made, trained, trainers, tmp_path):
    settings = {"output_dir": str(tmp_path), "lr_scheduler_type": "cosine", "weight_decay": 0.01, "max_grad_norm": 1.0}
    own = {"loss": partial(dpo, beta=0.3), "reference": made / "scores"}
    how = {"plan": made / "dpo" / "two", "model": made / "model", "settings": settings, "own": own, "port": free_port()}
    [(told, said), _] = trainers.run(2, chunk_trainer_here, size=2, **how)
    rows = lines(trained / "metrics.jsonl")
    logs = [entry for entry in told["logs"] if "loss" in entry]
    assert len(logs) == len(rows), said
    assert logs[0]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-7)
    for name, value in rows[0]["loss_metrics"].items():
        assert logs[0][name] == pytest.approx(value, rel=1e-7, abs=1e-7)
    assert [entry["rewards/accuracies"] for entry in logs][-1] == 1


def test_held_out_pairs_are_evaluated_by_the_loss(made, trained, tmp_path):
    """Not by cross-entropy, which is least where rejected answers are likely too."""
    more = ("--loss", "dpo", "--loss-options", "beta=0.3", "--reference", made / "scores", "--eval-every", 2)
    assert main(options(made, tmp_path / "run", *more, "--eval-plan", made / "dpo" / "one")) == 0
    rows, evaluations = lines(trained / "metrics.jsonl"), lines(tmp_path / "run" / "evals.jsonl")
    assert evaluations[0]["eval_loss"] == pytest.approx(rows[2]["loss"], rel=1e-9)  # of the weights after two steps
    assert evaluations[0]["loss_metrics"] == pytest.approx(rows[2]["loss_metrics"], rel=1e-9)


def test_scores_that_lack_sequences_of_the_plan_are_refused_before_the_run(made, tmp_path, capsys):
    fewer = shutil.copytree(made / "scores", tmp_path / "scores")
    [path] = fewer.glob("*.parquet")
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    assert main(options(made, tmp_path / "run", "--loss", "dpo", "--reference", fewer)) == 2
    said = capsys.readouterr().err
    assert "1 sequence of" in said and "without scores" in said and not (tmp_path / "run").exists()


def test_without_scores_the_model_without_its_adapters_is_the_reference(made, trained, tmp_path):
    assert main(options(made, tmp_path / "run", "--loss", "dpo", "--lora-rank", 2, "--max-steps", 2)) == 0
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(math.log(2), rel=1e-12) and rows[1]["loss"] < rows[0]["loss"]
    # Steps of an executor, whose reference is neither the data's nor that of scores.
    model, other = (with_adapters(AutoModelForCausalLM.from_pretrained(made / "model")) for _ in range(2))
    for each in (model, other):
        for name, weight in each.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(5))
    found = []
    for each, how in ((model, {}), (other, {"reference": Scores(made / "scores")})):
        executor = Executor.from_model(each.double())
        found.append(
            [executor.step(next(iter(executor.stream(made / "dpo" / "one"))), "ipo", **how), gradients_of(each)]
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        ("dpo", ("--loss", "dpo"), "--reference"),
        ("dpo", ("--loss", "sft"), "of ordinary data, the analysis has preference data"),
        ("dpo", ("--loss", "grpo"), "of rollouts data, the analysis has preference data"),
        ("ppo", ("--loss", "kto"), "of labelled or preference data, the analysis has rollouts data"),
        ("ppo", ("--loss", "ppo", "--loss-options", "beta=0.1"), "--reference"),
        ("dpo", ("--loss", "dpo", "--loss-options", "gamma=1"), "no option 'gamma'"),
        ("dpo", ("--loss", "dpo", "--loss-options", "beta=0"), "beta is '0', expected a number above 0"),
        ("dpo", ("--loss", "distillation"), "needs a teacher"),
        ("dpo", ("--loss", "nothing"), "give sft, dpo"),
        ("dpo", ("--loss", "dpo", "--reference", "no-scores"), "there are no scores"),
        ("ppo", ("--loss", "ppo", "--reference", "{scores}"), "of another analysis"),
    ],
)
def test_a_loss_without_what_it_needs_is_refused_by_name(made, tmp_path, capsys, plan, more, words):
    more = [str(each).format(scores=made / "scores") for each in more]
    code = main(options(made, tmp_path / "run", *more, plan=f"{plan}/one"))
    said = capsys.readouterr().err
    assert words in said and code == 2


def test_a_run_goes_on_with_the_same_loss_and_options_alone(made, tmp_path, capsys):
    same = ["--loss", "dpo", "--loss-options", "beta=0.3", "--reference", made / "scores", "--lr-schedule", "constant"]
    same += ["--save-every", 1]
    assert main(options(made, tmp_path / "run", *same, "--max-steps", 1)) == 0
    same += ["--max-steps", 2, "--resume"]
    for more in (("--loss-options", "beta=0.2"), ("--loss", "ipo")):
        capsys.readouterr()
        assert main(options(made, tmp_path / "run", *same, *more)) == 2
        assert f"{more[0]} " in capsys.readouterr().err
    assert main(options(made, tmp_path / "run", *same)) == 0


def test_a_step_with_a_part_of_a_group_is_refused(made):
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    executor = Executor.from_model(model)
    plan, analysis = load_plan(made / "dpo" / "one"), load_analysis(made / "dpo" / "analysis")
    work = next(iter(executor.stream(plan.path)))
    step = next(plan.iter_steps(0))
    read = SampleReader(analysis, analysis.tokens())
    alone = [chunk for chunk in step.chunks[0] if all(each.sequence_id != 1 for each in chunk.segments)]
    object.__setattr__(step, "chunks", {0: alone})
    object.__setattr__(work, "samples", read(step, [0]))
    with pytest.raises(DataError, match="1 of the 2 sequences of the group of"):
        executor.step(work, "simpo")


def test_the_options_of_the_functions_are_those_of_the_table():
    import inspect

    from chunkplan.config.losses import LOSSES
    from chunkplan_runtime.execution.losses import NAMED, clipped_policy

    assert {*NAMED} == {*LOSSES} - {"sft", "own", "distillation"}
    for name, function in NAMED.items():
        parameters = inspect.signature(function).parameters
        defaults = {key: each.default for key, each in parameters.items() if each.kind == each.KEYWORD_ONLY}
        if "options" in parameters:
            of_policy = inspect.signature(clipped_policy).parameters
            assert {*LOSSES[name].options} <= {*defaults, *of_policy}
        else:
            assert defaults == {key: default for key, (default, _) in LOSSES[name].options.items()}
        assert json.dumps({key: default for key, (default, _) in LOSSES[name].options.items()})
