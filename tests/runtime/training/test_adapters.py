"""Training of adapters: nothing else changes, what is saved is a peft adapter, and a stopped run goes on."""

from __future__ import annotations

import shutil
import signal
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from chunkplan import CostModel, PlanConfig, build, load_analysis
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.train import main, read_options
from chunkplan_runtime.training.setup import check_layout
from tests.support.training_cases import together
from tests.support.training_checks import after_step, learning, lines, same_weights

pytestmark = pytest.mark.usefixtures("base")
LORA = ("--lora-rank", 4, "--lora-dropout", 0.1, "--lora-targets", "q_proj,v_proj", "--lr", "3e-2")
LORA += ("--lr-schedule", "constant", "--warmup", 0)


def adapt(made, output, *more):
    arguments = ["--plan", made / "plan", "--model", made / "base", "--output", output, *LORA, *more]
    return main([str(argument) for argument in arguments])


def test_adapters_learn_and_are_saved_as_peft_loads_them(made, tmp_path):
    assert adapt(made, tmp_path, "--lora-targets", "all-linear", "--lora-rank", 16, "--lr", "1e-2") == 0
    rows = lines(tmp_path / "metrics.jsonl")
    assert sum(row["loss"] for row in rows[-2:]) < 0.95 * sum(row["loss"] for row in rows[:2])
    final = tmp_path / "final"
    assert {path.stat().st_mode for path in final.iterdir()} == {(tmp_path / "metrics.jsonl").stat().st_mode}
    saved = load_file(final / "adapter_model.safetensors")
    assert saved and all("lora_" in name and "head" not in name for name in saved)
    base = AutoModelForCausalLM.from_pretrained(made / "base")
    ids, _ = load_analysis(made / "analysis").tokens()(3)
    batch = torch.tensor(ids.astype("int64"))[None]
    with torch.no_grad():
        before = base(batch).logits
        after = PeftModel.from_pretrained(base, final)(batch).logits
        again = AutoModelForCausalLM.from_pretrained(final)(batch).logits
    assert not torch.equal(after, before)
    assert torch.equal(after, again), "transformers finds the model that was adapted"


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def test_a_stopped_run_of_adapters_goes_on_bit_for_bit(made, tmp_path, monkeypatch, precision):
    """With dropout; a checkpoint holds adapters only."""
    more = ("--save-every", 3, "--max-steps", 8, "--precision", precision)
    assert adapt(made, tmp_path / "whole", *more) == 0
    with monkeypatch.context() as patch:
        after_step(patch, 4, lambda: signal.raise_signal(signal.SIGTERM))
        assert adapt(made, tmp_path / "run", *more) == 143
    [file] = (tmp_path / "run" / "checkpoints" / "step-00000003" / "weights").iterdir()
    held = {name: weight for name, weight in load_file(file).items() if not name.startswith("step:")}
    assert held and all("lora_" in name and weight.dtype == torch.float32 for name, weight in held.items())
    assert adapt(made, tmp_path / "run", *more, "--resume") == 0
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")


def test_weights_in_4_bits_need_an_extra_that_is_named(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert adapt(made, tmp_path / "run", "--load-in-4bit") == 2
    said = capsys.readouterr().err
    assert "weights in 4 bits need bitsandbytes" in said and pip_install("qlora") in said


def test_weights_in_4_bits_are_refused_on_several_processes_also_where_only_the_plan_has_them(made, trainers, tmp_path):
    """Before any weight is loaded, so bitsandbytes need not be there. Without them the same plan can be trained."""
    config = PlanConfig(chunk_size=8, k=2, global_batch=3, dp=2, cp="off")
    build(made / "analysis", tmp_path / "plan", config, cost=CostModel(lora_rank=4, load_in_4bit=True))
    where = {"--plan": tmp_path / "plan", "--model": made / "base", "--output": tmp_path / "run", "--device": "cpu"}
    words = [str(word) for pair in where.items() for word in pair]

    (code, said), (other_code, _) = together(trainers, 2, words)
    assert (code, other_code) == (2, 2)
    assert "weights in 4 bits (--load-in-4bit, or as planned) with 2 processes\n" in said
    assert "hint: they are for one process; give --no-load-in-4bit" in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=r"weights in 4 bits \(--load-in-4bit, or as planned\) with 2 processes"):
        check_layout(read_options([*words, "--load-in-4bit"]), RankLayout(dp=2))
    ran = together(trainers, 2, [*words, "--no-load-in-4bit", "--max-steps", "1"])
    assert [code for code, _ in ran] == [0, 0], ran


def test_adapters_on_weights_in_4_bits_learn(made, tmp_path, capsys):
    """What is saved is an adapter, as on any weights."""
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    all_linear = ("--lora-targets", "all-linear", "--load-in-4bit", "--lora-rank", 16, "--lr", "1e-2")
    assert adapt(made, tmp_path / "run", *all_linear) == 0
    said = capsys.readouterr().err
    num_weights = sum(weight.numel() for weight in load_file(made / "base" / "model.safetensors").values())
    saved = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    num_trained = sum(weight.numel() for weight in saved.values())
    assert f": {num_weights + num_trained:,} weights, {num_trained:,} trained\n" in said
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["loss"] for row in rows[-2:]) < 0.95 * sum(row["loss"] for row in rows[:2])
    assert all(row["grad_norm"] > 0 for row in rows)
    assert adapt(made, tmp_path / "other", *all_linear, "--precision", "fp64") == 2
    assert "bitsandbytes does not compute in float64" in capsys.readouterr().err


def test_layers_that_are_not_there_are_refused(made, tmp_path, capsys):
    assert adapt(made, tmp_path / "run", "--lora-targets", "no_such_layer") == 2
    assert "no_such_layer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_adapters_do_not_go_on_with_other_weights_below_them(made, tmp_path, capsys):
    """No checkpoint holds the frozen weights, so what tells them apart is in its state."""
    shutil.copytree(made / "base", tmp_path / "base")
    where = ("--model", tmp_path / "base", "--save-every", 2, "--max-steps", 4)
    assert adapt(made, tmp_path / "run", *where) == 0
    shutil.rmtree(tmp_path / "run" / "final")
    assert adapt(made, tmp_path / "run", *where, "--resume") == 0
    assert adapt(made, tmp_path / "run", *where, "--resume") == 2
    assert "merge_and_unload" in capsys.readouterr().err, "a finished run of adapters is not a model to train on from"
    shutil.rmtree(tmp_path / "run" / "final")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    assert adapt(made, tmp_path / "run", *where, "--resume") == 2
    assert "frozen weights was" in capsys.readouterr().err
