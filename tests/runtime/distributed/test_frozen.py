"""Frozen weights: the others learn as in plain training, whatever processes share; a frozen one costs nothing."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from chunkplan_runtime.train import main
from tests.runtime.distributed.test_gradients import check
from tests.runtime.test_parity import MODELS
from tests.support.training_cases import all_well
from tests.support.training_checks import learning, lines, same_run, same_weights

TIED = MODELS["llama with biases, tied"]


@pytest.mark.parametrize(
    ("world_size", "plan", "how"),
    [
        (1, {}, {"freeze": ["model.embed_tokens*"]}),
        (2, {"dp": 2}, {"train_only": ["lm_head*"]}),
        (2, {"dp": 2}, {"freeze": ["*.layers.[01].*", "*norm*"], "sharding": "gradients"}),
        (2, {"pp": 2}, {"train_only": ["*.3.self_attn.?_proj.weight", "lm_head*"]}),
        (4, {"dp": 2, "pp": 2, "schedule": "zero-bubble"}, {"freeze": ["*.embed_tokens*"], "sharding": "weights"}),
        pytest.param(
            *(4, {"dp": 2, "pp": 2, "schedule": "interleaved"}, {"train_only": ["*.layers.2.*"]}),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_what_is_trained_has_the_gradients_of_plain_training(pool, plan_of, world_size, plan, how):
    """In float64, of a head of its own; whole layers, ends of the model, single matrices."""
    check(pool, world_size, plan_of(**{"k": 2, **plan}), evaluates=True, **how)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_are_frozen_by_either_name(pool, plan_of, name):
    check(pool, 2, plan_of(TIED, pp=2), freeze=[name])
    check(pool, 2, plan_of(TIED, pp=2), train_only=[name])


FROZEN = ("--freeze", "model.embed_tokens*,*.0.self_attn.*")


def learn(base, output, *more, plan="one"):
    arguments = ["--plan", base.parent / plan, "--model", base, "--output", output, "--lr", "3e-3"]
    return [str(argument) for argument in (*arguments, "--device", "cpu", *more)]


def is_frozen(name):
    return name.startswith("model.embed_tokens") or ".0.self_attn." in name


def test_frozen_weights_stay_and_no_checkpoint_holds_them(base, tmp_path, capsys):
    more = (*FROZEN, "--save-every", 2, "--max-steps", 4, "--precision", "bf16")
    assert main(learn(base, tmp_path / "run", *more)) == 0
    said = capsys.readouterr().err
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "run" / "final"))
    trained_names = {name for name in before if not is_frozen(name)}
    for name, weight in before.items():
        assert torch.equal(weight.bfloat16(), after[name]) == is_frozen(name), name
    assert f"{sum(before[name].numel() for name in trained_names):,} trained" in said
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    [weights], [states] = ([*(checkpoint / name).iterdir()] for name in ("weights", "optimizer"))
    held = {name: each for name, each in load_file(weights).items() if not name.startswith("step:")}
    assert held.keys() == trained_names and all(each.dtype == torch.float32 for each in held.values())
    assert {name.partition(":")[0] for name in load_file(states) if not name.startswith("step:")} == trained_names


def test_a_run_with_frozen_weights_goes_on_and_not_with_others(base, tmp_path, capsys):
    more = (*FROZEN, "--save-every", 2, "--max-steps", 5)
    assert main(learn(base, tmp_path / "whole", *more)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    for other in (("--freeze", "model.embed_tokens*"), ("--train-only", "*.mlp.*")):
        again = [word for word in learn(base, tmp_path / "run", *more) if word not in FROZEN]
        assert main([*again, *other, "--resume"]) == 2
        assert "is of another run: --freeze was" in capsys.readouterr().err
    assert main(learn(base, tmp_path / "run", *more, "--resume")) == 0
    assert "resumed   at step 4" in capsys.readouterr().err
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")


@pytest.mark.soak
@pytest.mark.parametrize("sharding", ["optimizer", pytest.param("weights", marks=pytest.mark.soak)])
def test_four_processes_with_frozen_weights_train_as_one_does(base, trainers, tmp_path, sharding):
    more = (*FROZEN, "--precision", "fp64", "--save-every", 0, "--max-steps", 3)
    assert main(learn(base, tmp_path / "one", *more)) == 0
    all_well(trainers, 4, learn(base, tmp_path / "both", *more, "--sharding", sharding, plan="both"))
    same_run(tmp_path / "one", tmp_path / "both")
    after = load_file(tmp_path / "both" / "final" / "model.safetensors")
    for name, weight in load_file(base / "model.safetensors").items():
        assert not is_frozen(name) or torch.equal(weight.double(), after[name])


def test_frozen_rows_are_kept_in_the_dtype_they_are_used_in(base, trainers, tmp_path):
    """On two processes in bfloat16; what is trained has fp32 master weights."""
    more = (*FROZEN, "--precision", "bf16", "--save-every", 2, "--max-steps", 2)
    all_well(trainers, 4, learn(base, tmp_path / "run", *more, plan="both"))
    after = load_file(tmp_path / "run" / "final" / "model.safetensors")
    for name, weight in load_file(base / "model.safetensors").items():
        assert after[name].dtype == torch.bfloat16
        assert not is_frozen(name) or torch.equal(weight.bfloat16(), after[name])
    assert all(row["grad_norm"] > 0 for row in lines(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("more", "said", "hint"),
    [
        (
            ("--freeze", "embed_tokens*"),
            "--freeze 'embed_tokens*' is the name of no weight; near are model.embed_tokens.weight",
            "for example --freeze '*embed_tokens*'",
        ),
        (
            ("--freeze", "nothing*"),
            "is the name of no weight; there are model.embed_tokens.weight, model.layers.*.self_attn.k_proj.weight, ",
            "for example --freeze model.embed_tokens.weight",
        ),
        (("--train-only", "lm_haed.weight"), "near are lm_head.weight", "for example --train-only lm_head.weight"),
        (("--freeze", "*"), "--freeze '*' leaves nothing to train", "such as --freeze model.embed_tokens.weight"),
        (("--freeze", "*", "--train-only", "*"), "--freeze and --train-only are both given", "give one of them"),
        (("--freeze", "*norm*", "--lora-rank", 2), "--freeze with adapters of rank 2", "leave --freeze out"),
    ],
)
def test_patterns_that_say_nothing_are_refused(base, tmp_path, capsys, more, said, hint):
    assert main(learn(base, tmp_path / "run", *more)) == 2
    message, _, hinted = capsys.readouterr().err.rstrip().rpartition("\nhint: ")
    assert said in message and hint in hinted
    assert not (tmp_path / "run").exists()
