"""Adapters merged into their weights at the end of a run: what is saved computes what the adapted model does."""

from __future__ import annotations

import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan.errors import UsageError
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.train import main
from chunkplan_runtime.training.final import check_mergeable, merge_adapters
from tests.support.training_cases import all_well

pytestmark = pytest.mark.usefixtures("base")
TOKENS = torch.arange(1, 60)[None]


def adapt(made, output, *more, plan="one", model="base"):
    where = ("--plan", made / plan, "--model", made / model, "--output", output, "--device", "cpu")
    how = ("--lora-rank", 4, "--lr", "3e-2", "--max-steps", 4, "--precision", "fp64")
    return [str(word) for word in (*where, *how, *more)]


@torch.no_grad()
def logits(model):
    return model.double().eval()(TOKENS).logits


def test_a_merged_model_computes_what_base_and_adapters_do(made, tmp_path):
    """In float64; it needs no peft, goes on training, and resumes as any run does."""
    assert main(adapt(made, tmp_path / "apart")) == 0
    more = ("--merge-adapters", "--save-every", 2)
    assert main(adapt(made, tmp_path / "whole", *more)) == 0
    base = AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.float64)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, tmp_path / "apart" / "final"))
    final = tmp_path / "whole" / "final"
    assert not (final / "adapter_config.json").exists()
    found = logits(AutoModelForCausalLM.from_pretrained(final))
    assert (expected - before).norm() > 0.01 * before.norm()
    assert (found - expected).norm() <= 1e-14 * expected.norm()
    weights = load_file(final / "model.safetensors")
    assert weights.keys() == load_file(made / "base" / "model.safetensors").keys()
    assert {weight.dtype for weight in weights.values()} == {torch.float64}
    assert main(adapt(made, tmp_path / "further", "--lora-rank", 0, model=final)) == 0


@pytest.mark.soak
@pytest.mark.parametrize("sharding", ["optimizer", pytest.param("weights", marks=pytest.mark.soak)])
def test_four_processes_merge_what_one_does(made, trainers, tmp_path, sharding):
    assert main(adapt(made, tmp_path / "one", "--merge-adapters")) == 0
    all_well(trainers, 4, adapt(made, tmp_path / "both", "--merge-adapters", "--sharding", sharding, plan="both"))
    one, both = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "both"))
    assert one.keys() == both.keys()
    for name, weight in one.items():
        torch.testing.assert_close(both[name], weight, rtol=1e-10, atol=1e-12)
    assert {path.name for path in (tmp_path / "both" / "final").iterdir()} == {
        path.name for path in (tmp_path / "one" / "final").iterdir()
    }


def test_sums_are_in_float32_and_rounded_once_to_bfloat16(made, tmp_path):
    more = ("--merge-adapters", "--precision", "bf16", "--save-every", 4, "--lora-alpha", 10)
    assert main(adapt(made, tmp_path / "run", *more)) == 0
    [file] = (tmp_path / "run" / "checkpoints" / "step-00000004" / "weights").iterdir()
    masters = load_file(file)
    base, found = (load_file(path / "model.safetensors") for path in (made / "base", tmp_path / "run" / "final"))
    for name, weight in base.items():
        expected = weight.bfloat16().float()
        factor = f"base_model.model.{name.removesuffix('weight')}lora_{{}}.default.weight"
        if factor.format("A") in masters:
            expected += 10 / 4 * (masters[factor.format("B")] @ masters[factor.format("A")])
        assert torch.equal(found[name], expected.bfloat16()), name
    assert sum("lora_A" in name for name in masters) == 14


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8}),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}),
    ],
)
def test_a_model_of_any_form_is_merged_and_written_in_several_files(tiny_config, tmp_path, kind, more):
    """Transposed weights; experts, of which a checkpoint has each by itself; recurrent layers."""
    config = AutoConfig.for_model(**tiny_config(kind, **more))
    of_experts = ("q_proj", "gate_proj", "up_proj", "down_proj")
    targets = of_experts if kind == "qwen3_moe" else ("all-linear",)
    model = add_lora(new_model(config, torch.float64, seed=3), rank=2, alpha=3.0, targets=targets)
    torch.manual_seed(1)
    for name, weight in model.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    held = {name: value.clone() for name, value in model.model.state_dict().items()}
    assert any("experts" in name and "lora_B" in name for name in held) is (kind == "qwen3_moe")
    how = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_config(config, **how)
    of_base = {name.removeprefix("base_model.model."): held[name] for name in held if "lora_" not in name}
    plain.load_state_dict({name.replace("base_layer.", ""): value for name, value in of_base.items()})
    before = logits(plain)
    model.model.save_pretrained(tmp_path / "adapter")
    expected = logits(PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    assert (expected - before).norm() > 0.01 * before.norm()

    with torch.no_grad():
        merge_adapters(model.model, held).save_pretrained(tmp_path / "final", max_shard_size="50KB")
    assert len([*(tmp_path / "final").glob("*.safetensors")]) > 1
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "final", **how))
    assert (found - expected).norm() <= 1e-14 * expected.norm()


def test_an_adapter_of_a_weight_that_others_use_is_refused(tiny_config):
    config = AutoConfig.for_model(**tiny_config("qwen2", tie_word_embeddings=True))
    model = add_lora(new_model(config, torch.float32, seed=3), rank=2, alpha=3.0, targets=("lm_head",))
    with pytest.raises(UsageError, match=r"lm_head.weight has an adapter, and another layer has the same weight"):
        check_mergeable(model.model)


@pytest.mark.parametrize(
    ("more", "said", "hint"),
    [
        (("--lora-targets", "embed_tokens"), "that of model.embed_tokens.weight (Embedding) is none", "--lora-targets"),
        (("--load-in-4bit",), "--merge-adapters with weights in 4 bits", "--no-load-in-4bit"),
        (("--lora-rank", 0), "--merge-adapters without --lora-rank would do nothing", "give --lora-rank too"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_a_step(made, tmp_path, capsys, monkeypatch, more, said, hint):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(adapt(made, tmp_path / "run", "--merge-adapters", *more)) == 2
    message, _, hinted = capsys.readouterr().err.rstrip().rpartition("\nhint: ")
    assert said in message and hint in hinted
    assert not (tmp_path / "run").exists()
