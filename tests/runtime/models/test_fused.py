"""Fused kernels: modules call them where they compute the same, gradients stay, the planner counts what they spare."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from chunkplan import PlanConfig, build
from chunkplan.cost.activations import activation_bytes_per_token
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.errors import UsageError
from chunkplan_runtime.models.fused import fuse
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.parity import compare_plan
from chunkplan_runtime.train import main
from tests.support.places import ROOT
from tests.support.training_cases import together
from tests.support.training_checks import cost_of_a_run, learning, options

CPU = torch.device("cpu")
CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]

#: What torch has kernels for, of a model of two layers. Gemma's norms multiply by 1 and their weights.
NORMS = {
    "llama": "5 norms",
    "qwen3": "9 norms",
    "olmo2": "9 norms",
    "cohere": "3 norms",
    "phi3": "5 norms",
    "gemma2": "nothing; as they are: 9 Gemma2RMSNorm",
    "falcon_h1": "5 norms",
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 32}
SIZES = {
    "falcon_h1": MAMBA,
    "gemma2": {"sliding_window": 8},
    "phi3": {"pad_token_id": None},
    "cohere": {"pad_token_id": None},
}


@pytest.fixture
def model(tiny_config):
    """`make(model_type, dtype)` -> a model whose norms multiply by random weights."""

    def make(model_type="llama", dtype=torch.float64, **changes):
        sizes = {**SIZES.get(model_type, {}), **changes}
        made = new_model(AutoConfig.for_model(**tiny_config(model_type, **sizes)), dtype, seed=1)
        for weight in made.model.parameters():
            if weight.ndim == 1:
                weight.data += 0.1 * torch.randn_like(weight)
        return made

    return make


def gradients(made):
    with evaluate_in_float64(made.model):
        made.model.config._attn_implementation = "eager"
        logits = made.model(input_ids=torch.arange(12)[None], use_cache=False).logits
        logits.square().mean().backward()
    found = {name: weight.grad for name, weight in made.model.named_parameters() if weight.grad is not None}
    made.model.zero_grad()
    return found


@pytest.mark.parametrize("model_type", NORMS)
def test_a_model_computes_with_fused_norms_what_it_does_without(model, model_type):
    made = model(model_type)
    expected = gradients(made)
    assert str(fuse(made.model, "torch", CPU)) == NORMS[model_type]
    found = gradients(made)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


def test_nothing_is_fused_that_computes_something_else():
    """By its code, by another dtype, or by what it is called with: no name of a class is believed."""

    class SizeNorm(nn.Module):
        def __init__(self, eps=1e-6, power=2):
            super().__init__()
            self.weight, self.eps, self.power = nn.Parameter(torch.ones(8)), eps, power

        def forward(self, hidden, gate=None):
            size = hidden.abs().pow(self.power).mean(-1, keepdim=True).add(self.eps).pow(-1 / self.power)
            return self.weight * (hidden if gate is None else hidden * gate) * size

    two, three = SizeNorm(), SizeNorm(power=3)
    hidden = torch.randn(3, 8)
    before = [(norm(hidden), norm(hidden, hidden)) for norm in (two, three)]
    assert (
        str(fuse(nn.ModuleList([two, three, nn.RMSNorm(8), nn.Linear(8, 8)]), "torch", CPU))
        == "1 norms; as they are: 1 SizeNorm"
    )
    assert torch.equal(two(hidden=hidden), before[0][0])
    assert "forward" in vars(two) and "forward" not in vars(three)
    for norm, (alone, gated) in zip((two, three), before, strict=True):
        torch.testing.assert_close(norm(hidden), alone)
        assert torch.equal(norm(hidden, hidden), gated)
        assert norm(hidden.double()).dtype == torch.float64  # as its own code promotes


class Norm(nn.Module):
    """Like Llama's, and otherwise in one way."""

    def __init__(self, how=None, scale=1.0):
        super().__init__()
        self.weight, self.eps, self.how = nn.Parameter(torch.ones(64)), 1e-6, how
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, hidden):
        given = hidden.clamp(-10, 10) if self.how == "clamped" else hidden
        given = given[..., :16] if self.how == "of a part" else given
        if self.how == "of groups":
            given = given.unflatten(-1, (-1, 16))
        factor = torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.how == "of groups":
            factor = factor.expand(*factor.shape[:-1], 16).flatten(-2)
        if self.how == "without a gradient":
            factor = factor.detach()
        if self.how == "of dropout":
            hidden = nn.functional.dropout(hidden, 0.5, self.training)
        if self.how == "of four dimensions" and hidden.ndim == 4:
            factor = factor.flip(1)
        if self.how == "clamped":
            hidden = given
        made = self.weight * (hidden * factor) * self.scale
        return made.float() if self.how == "of another dtype" else made


@pytest.mark.parametrize(
    "how",
    ["clamped", "of a part", "of groups", "without a gradient", "of dropout", "of four dimensions", "of another dtype"],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_norm_that_differs_in_one_way_stays_as_it_is(how, is_training):
    norm = Norm(how).to(torch.bfloat16).train(is_training)
    assert str(fuse(nn.ModuleList([norm]), "torch", CPU)) == "nothing; as they are: 1 Norm"
    assert norm.training == is_training
    assert (
        str(fuse(nn.ModuleList([Norm(scale=0.5), Norm(), Norm(scale=0.5)]), "torch", CPU))
        == "1 norms; as they are: 2 Norm"
    )


@pytest.mark.parametrize(
    ("level", "rank"),
    [("none", 0), ("keep-products", 4), ("full", 0), ("offload", 4)]
    + [
        pytest.param(*case, marks=pytest.mark.soak)
        for case in (("none", 4), ("keep-products", 0), ("full", 4), ("offload", 0))
    ],
)
def test_gradients_in_chunks_are_exact_with_fused_norms(model, handmade_plan, random_sequences, level, rank):
    made = model("qwen3")
    fuse(made.model, "torch", CPU)
    made = add_lora(made, rank=rank, alpha=4) if rank else made
    made.set_checkpointing(level)
    plan, analysis = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=2)
    assert compare_plan(plan, analysis, made).max_relative_error <= 1e-12


def test_processes_train_as_planned_with_fused_norms_and_say_so(made, trainers, tmp_path, capfd):
    """On two stages that share nothing, as on one process; the plan's times are for another kind of run."""
    cost = cost_of_a_run(made)
    fused = CostModel(shape=cost.shape, hardware=cost.hardware, precision="fp32", fused_kernels="torch")
    for pp, name in ((1, "fused"), (2, "stages")):
        plan = PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=2, pp=pp)
        build(made / "analysis", tmp_path / name, plan, cost=fused)
    more = ("--device", "cpu", "--precision", "fp32")
    assert main(options(made, tmp_path / "one", *more, plan=tmp_path / "fused")) == 0
    said = capfd.readouterr().err
    assert "fused     by torch: 5 norms\n" in said and "predicts  no times" not in said
    arguments = options(made, tmp_path / "two", *more, plan=tmp_path / "stages")
    told = together(trainers, 2, arguments)
    assert [code for code, _ in told] == [0, 0], told
    assert main(options(made, tmp_path / "none", *more, "--fused-kernels", "none", plan=tmp_path / "fused")) == 0
    said = capfd.readouterr().err
    assert "fused     " not in said
    assert "the plan's times are for --fused-kernels torch; this run has --fused-kernels none" in said
    assert "`chunkplan build` with `--fused-kernels none`" in said
    for run in ("two", "none"):
        for row, expected in zip(learning(tmp_path / run), learning(tmp_path / "one"), strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_kernels_that_are_not_there_are_refused(made, tmp_path, capsys):
    assert main(options(made, tmp_path / "run", "--fused-kernels", "liger", "--device", "cpu")) == 2
    said = capsys.readouterr().err
    assert "--fused-kernels liger needs liger-kernel" in said or "kernels of liger run on a GPU only" in said
    assert "hint: " in said and not (tmp_path / "run" / "final").exists()
    with pytest.raises(UsageError, match="--fused-kernels is"):
        CostModel(fused_kernels="triton")


def test_the_planner_counts_what_fused_kernels_spare():
    """Of Qwen2.5-7B in bf16: 4 h of each norm, the activation of the gate; and what copies take, not products."""
    none, torchs, ligers = (CostModel(fused_kernels=kernels) for kernels in ("none", "torch", "liger"))
    [layer], hidden = none.shape.kinds, none.shape.hidden_size
    held = [activation_bytes_per_token(cost, layer) for cost in (none, torchs, ligers)]
    assert [round(each / 1024) for each in held] == [220, 192, 155]  # as docs/cost-model.md has it
    assert held[0] - held[1] == 2 * 4 * hidden
    assert held[1] - held[2] == 2 * layer.mlp_width
    rates = [cost.rates for cost in (none, torchs, ligers)]
    copies = 2 / none.hardware.copy_bytes * 1e9
    assert rates[0].token - rates[1].token == pytest.approx(2 * 16 * hidden * copies)
    assert rates[1].token - rates[2].token == pytest.approx(2 * layer.mlp_width * copies)
    assert [rates[0].chunk - each.chunk for each in rates] == [
        pytest.approx(number * none.hardware.kernel_ns) for number in (0, 14, 15)
    ]
    assert len({(each.pair, each.head) for each in rates}) == 1
    adapters = [
        activation_bytes_per_token(CostModel(lora_rank=8, fused_kernels=each), layer) for each in ("none", "torch")
    ]
    assert adapters[0] - adapters[1] == 2 * (4 - 2) * hidden  # frozen norms do not read what they scale


def test_entries_of_a_cost_model_name_fused_kernels_only_where_there_are_some():
    assert "fused_kernels" not in CostModel().to_dict()
    fused = CostModel(fused_kernels="liger")
    assert fused.to_dict()["fused_kernels"] == "liger"
    assert CostModel.from_dict(fused.to_dict(), where="a test") == fused


def test_kernels_of_liger_compute_what_models_do_and_hold_what_the_planner_counts(tmp_path, tiny_config):
    """In Triton's interpreter, in float32: as near as rounding."""
    pytest.importorskip("liger_kernel", reason="liger-kernel and triton are not installed (the extra liger)")
    counts = {
        "llama": "5 norms and 2 gated MLPs",
        "qwen3": "9 norms and 2 gated MLPs",
        "gemma2": "9 norms and 2 gated MLPs",
        "phi3": "5 norms and 2 gated MLPs",
        "olmo2": "5 norms and 2 gated MLPs; as they are: 4 Olmo2RMSNorm",
    }
    sizes = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32}
    documents = [
        {**tiny_config(name, **sizes, **SIZES.get(name, {})), "num_hidden_layers": layers}
        for name in counts
        for layers in (2, 4)
    ]
    (tmp_path / "configs.json").write_text(json.dumps(documents))
    command = [sys.executable, "-m", "tests.support.liger_cases", str(tmp_path / "configs.json")]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each["fused"] for each in found[::2]] == list(counts.values())
    for document, few, more in zip(documents[::2], found[::2], found[1::2], strict=True):
        assert max(few["logits"], more["logits"]) < 2e-6 and max(few["gradients"], more["gradients"]) < 2e-5
        shape = shape_of_config(document, "a test")
        predicted = activation_bytes_per_token(
            CostModel(shape=shape, precision="fp32", fused_kernels="liger"), shape.kinds[0]
        )
        measured = (more["held"] - few["held"]) / 2
        # Phi-3 keeps queries with all that its one matrix makes, fused or not; Liger leaves norms of OLMo 2.
        if document["model_type"] not in ("phi3", "olmo2"):
            assert measured <= predicted <= 1.1 * measured, document["model_type"]
