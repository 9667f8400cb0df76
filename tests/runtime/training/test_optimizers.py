"""Optimizers by name: each learns, and a stopped run of it goes on bit for bit; what cannot be is refused."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from chunkplan import PlanConfig, build
from chunkplan.cost.optimizers import OPTIMIZERS
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.train import main, read_options
from chunkplan_runtime.training.optimizer import blocks_shape, make_optimizer
from tests.support import training_checks
from tests.support.training_cases import together
from tests.support.training_checks import after_step, cost_of_a_run, learning, lines, same_weights

pytestmark = pytest.mark.usefixtures("wide")
NOT_INSTALLED = "the extra qlora is not installed"


@pytest.fixture(scope="module")
def wide(made, tiny_config):
    """A model with rows of 256 numbers, a block."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    (made / "wide.json").write_text(json.dumps({**tiny_config("qwen2"), **sizes, "head_dim": 32}))


def options(made, output, *more, **plan):
    return training_checks.options(made, output, "--model-config", made / "wide.json", *more, **plan)


def need(optimizer):
    if optimizer == "adamw-8bit":
        pytest.importorskip("bitsandbytes", reason=NOT_INSTALLED)


#: A stopped run of AdamW is that of `test_resume.py`.
STOPPED = [pytest.param(name, marks=pytest.mark.soak) if name in ("adamw", "sgd") else name for name in OPTIMIZERS]


@pytest.mark.parametrize("optimizer", STOPPED)
def test_each_learns_and_a_stopped_run_goes_on_bit_for_bit(made, tmp_path, monkeypatch, optimizer):
    need(optimizer)
    rate = {"sgd": "0.3", "adafactor": "0.1"}.get(optimizer, "3e-3")
    more = ("--optimizer", optimizer, "--lr", rate, "--save-every", 3, "--precision", "bf16")
    assert main(options(made, tmp_path / "whole", *more)) == 0
    rows = lines(tmp_path / "whole" / "metrics.jsonl")
    assert sum(row["loss"] for row in rows[-2:]) < 0.95 * sum(row["loss"] for row in rows[:2])
    with monkeypatch.context() as patch:
        after_step(patch, 4, lambda: signal.raise_signal(signal.SIGTERM))
        assert main(options(made, tmp_path / "run", *more)) == 143
    assert main(options(made, tmp_path / "run", *more, "--resume")) == 0
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")


@pytest.mark.parametrize("optimizer", ["adamw-8bit", pytest.param("sgd", marks=pytest.mark.soak)])
def test_processes_that_share_states_learn_what_one_does_and_others_read_their_checkpoints(
    made, trainers, tmp_path, optimizer
):
    need(optimizer)
    more = ("--device", "cpu", "--optimizer", optimizer, "--save-every", 2, "--keep-last", 9)
    assert main(options(made, tmp_path / "one", *more, plan="two")) == 0
    arguments = options(made, tmp_path / "two", *more, plan="two")
    told = together(trainers, 2, arguments)
    assert [code for code, _ in told] == [0, 0], told
    shutil.rmtree(tmp_path / "two" / "final")
    for path in sorted((tmp_path / "two" / "checkpoints").iterdir())[2:]:
        shutil.rmtree(path)
    assert main([*arguments, "--resume"]) == 0
    for row, expected in zip(learning(tmp_path / "two"), learning(tmp_path / "one"), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_moments_of_8_bits_are_those_of_bitsandbytes_own_optimizer():
    """Of a weight of which it has blocks too, bit for bit; of others AdamW's of torch."""
    pytest.importorskip("bitsandbytes", reason=NOT_INSTALLED)
    own = importlib.import_module("chunkplan_runtime.training.optimizer")
    theirs = importlib.import_module("bitsandbytes.optim").AdamW8bit
    start = [torch.randn(32, 512), torch.randn(40), torch.randn(64, 100)]
    ours, other = ([each.clone().requires_grad_() for each in start] for _ in range(2))
    assert [blocks_shape(each) for each in start] == [(32, 2), None, None]
    how = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    first = own.make_adamw_8bit(torch.device("cpu"), [{"params": ours, "weight_decay": 0.1}], **how)
    second = theirs(other[:1], weight_decay=0.1, **how)
    third = torch.optim.AdamW(other[1:], weight_decay=0.1, **how)
    for _ in range(5):
        for mine, its in zip(ours, other, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        for each in (first, second, third):
            each.step()
    assert torch.equal(ours[0], other[0])
    for mine, its in zip(ours[1:], other[1:], strict=True):
        torch.testing.assert_close(mine, its)


def test_what_cannot_be_is_refused(made, tmp_path, capsys, monkeypatch):
    def refused(*more):
        assert main(options(made, tmp_path / "run", *more)) == 2
        return capsys.readouterr().err

    assert "--beta2 with --optimizer sgd would do nothing" in refused("--optimizer", "sgd", "--beta2", 0.5)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)
        patch.setitem(sys.modules, "bitsandbytes.functional", None)
        said = refused("--optimizer", "adamw-8bit")
    assert "--optimizer adamw-8bit needs bitsandbytes" in said and pip_install("qlora") in said


def test_rows_and_columns_are_not_shared(made, tmp_path):
    config = read_options(options(made, tmp_path / "two", "--optimizer", "adafactor", plan="two"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(UsageError, match="--optimizer adafactor goes by whole rows and columns of a weight"):
            make_optimizer({"weight": rows}, config)
    finally:
        dist.destroy_process_group()


def test_float64_and_devices_that_bitsandbytes_does_not_know_are_refused(made, tmp_path, capsys):
    pytest.importorskip("bitsandbytes", reason=NOT_INSTALLED)
    assert main(options(made, tmp_path / "run", "--optimizer", "adamw-8bit", "--precision", "fp64")) == 2
    assert "bitsandbytes does not compute in float64" in capsys.readouterr().err


def test_the_optimizer_is_that_of_the_plan_unless_it_is_given(made, tmp_path, capsys):
    """A plan without times of it says nothing; one that remembers more than planned may not fit; a resume keeps it."""
    cost = replace(cost_of_a_run(made), optimizer="sgd")
    build(made / "analysis", tmp_path / "plan", PlanConfig(chunk_size=8, k=2, global_batch=3), cost=cost)
    arguments = [*options(made, tmp_path / "run", "--save-every", 1), "--plan", str(tmp_path / "plan")]
    assert main(arguments) == 0
    assert "may not fit" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "final")
    assert main([*arguments, "--resume", "--optimizer", "adamw"]) == 2
    assert "--optimizer was sgd, is adamw" in capsys.readouterr().err
    assert main([*arguments, "--output", str(tmp_path / "other"), "--optimizer", "adamw"]) == 0
    assert "optimizer adamw: the plan's memory is that of sgd; it may not fit" in capsys.readouterr().err
