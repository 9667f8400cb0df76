"""Trainers of TRL in chunks learn what they learn on whole sequences: their own losses, rewards and references."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM
from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from chunkplan.errors import UsageError
from chunkplan_runtime.adapters.trl import with_chunks
from chunkplan_runtime.training.executor import Executor
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.trl_cases import CHUNK_SIZE, PAIRS, longest_forwards, new_trainer, run, save_model

CHUNKS = {"chunk_size": CHUNK_SIZE, "k": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture
def new(model, tmp_path, monkeypatch):
    """A new trainer of a case; no test has the mixed precision of another, which accelerate keeps."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    AcceleratorState._reset_state(reset_partial_state=True)
    return lambda case, chunked=CHUNKS, **how: new_trainer(case, model, tmp_path / "out", chunked, **how)


@pytest.mark.parametrize(
    "case",
    [
        "dpo",
        "dpo lora",
        "grpo",
        "grpo lora",
        *(pytest.param(case, marks=pytest.mark.soak) for case in ("ipo", "wpo", "kto", "kto lora", "gspo", "rloo")),
    ],
)
def test_steps_have_the_losses_and_weights_of_whole_sequences(case, new) -> None:
    """Three steps of AdamW, of two micro-batches each; and no layer ever has more tokens than a chunk."""
    losses, weights, logged = run(new(case, None))
    trainer = new(case)
    with longest_forwards(trainer) as tokens:
        found, chunked, also_logged = run(trainer)
    assert found == pytest.approx(losses, rel=1e-6, abs=1e-9)  # TRL logs them in float32
    worst = max((chunked[name] - weight).norm() / weight.norm().clamp(min=1e-300) for name, weight in weights.items())
    assert worst < 1e-12
    assert max(tokens) == CHUNK_SIZE
    for before, after in zip(logged, also_logged, strict=True):
        same = [name for name in before if name not in ("loss", "step_time")]
        assert [after[name] for name in same] == pytest.approx([before[name] for name in same], rel=1e-6, abs=1e-9)


def test_shared_prefixes_change_how_many_tokens_run_and_nothing_else(new) -> None:
    found = []
    for share_prefixes in (False, True):
        trainer = new("long", CHUNKS | {"share_prefixes": share_prefixes})
        with longest_forwards(trainer) as tokens:
            _, weights, _ = run(trainer)
        found.append((weights, sum(tokens)))
        assert max(tokens) == CHUNK_SIZE
    (weights, num_tokens), (same, fewer) = found
    assert max((same[name] - each).norm() / each.norm().clamp(min=1e-300) for name, each in weights.items()) < 1e-12
    assert fewer < 0.7 * num_tokens


@pytest.mark.parametrize(("settings", "tolerance"), [({}, 1e-5), ({"bf16": True}, 0.02)])
def test_in_float32_and_in_mixed_precision_only_rounding_differs(settings, tolerance, new) -> None:
    """With TRL's own kernel for log-probabilities, and one step, which decides nothing by rounding."""
    found = [
        run(new("dpo", each, dtype=torch.float32, max_steps=2, **settings), exact=False) for each in (None, CHUNKS)
    ]
    assert found[1][0] == pytest.approx(found[0][0], rel=tolerance)


def test_references_that_are_computed_before_training_are_computed_in_chunks(new) -> None:
    with mock.patch.object(Executor, "log_probs", autospec=True, side_effect=Executor.log_probs) as log_probs:
        trainer = new("dpo", precompute_ref_log_probs=True, beta=0.2)
    assert log_probs.call_count == 4
    found = run(trainer)
    assert found[0] == pytest.approx(run(new("dpo", None, beta=0.2))[0], rel=1e-6)


def test_an_evaluation_is_that_of_whole_sequences_and_takes_no_metrics_of_logits(new) -> None:
    losses = []
    for chunked in (None, CHUNKS):
        trainer = new("dpo", chunked, given={"eval_dataset": Dataset.from_dict(PAIRS).select(range(6))})
        with longest_forwards(trainer) as tokens:
            run(trainer)
            losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and max(tokens) == CHUNK_SIZE
    with pytest.raises(UsageError, match="compute_metrics cannot be done in chunks"):
        new("dpo", given={"compute_metrics": lambda _: {}})


@pytest.mark.soak
def test_two_processes_learn_what_they_learn_under_ddp(model, tmp_path) -> None:
    (tmp_path / "model").symlink_to(model)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--master-port", str(free_port()), str(ROOT / "tests/support/trl_cases.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    for case in ("dpo", "grpo lora"):
        plain, chunks = first[f"{case}, plain"], first[f"{case}, chunks"]
        assert chunks == second[f"{case}, chunks"]
        assert chunks["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert list(chunks["norms"].values()) == pytest.approx(list(plain["norms"].values()), rel=1e-12)


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        ("dpo", {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 cannot be done in chunks"),
        ("dpo", {"torch_compile": True}, "torch_compile=True cannot be done in chunks"),
        ("dpo", {"optim": "lomo"}, "'lomo' steps in every backward"),
        ("grpo", {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True cannot be done in chunks"),
        ("grpo", {"use_liger_kernel": True}, "use_liger_kernel=True cannot be done in chunks"),
    ],
)
def test_settings_that_chunks_cannot_honour_are_refused_by_name(case, settings, words, new) -> None:
    with pytest.raises(UsageError, match=words) as error:
        new(case, **settings)
    assert error.value.hint


@pytest.mark.parametrize(
    ("trainer", "sizes", "words"),
    [
        (SFTTrainer, CHUNKS, "SFTTrainer is no trainer whose log-probabilities are known here"),
        (DPOTrainer, {"chunk_size": 0}, "chunk-size is 0"),
        (GRPOTrainer, {"chunk_size": 8, "k": 0}, "k is 0"),
    ],
)
def test_other_trainers_and_sizes_are_refused_at_once(trainer, sizes, words) -> None:
    with pytest.raises(UsageError, match=words):
        with_chunks(trainer, **sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pixel_values": torch.zeros(1)}, "the trainer gives the model pixel_values"),
        ({"output_router_logits": True}, "the trainer gives the model output_router_logits"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])}, "row 1 of a batch has a gap"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])}, "row 1 of a batch has a target that no token"),
    ],
)
def test_batches_that_chunks_cannot_take_are_refused_by_name(changes, words, new) -> None:
    trainer = new("dpo")
    tokens = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    labels = torch.tensor([[-100, -100, 7, 8], [-100, -100, 7, 6]])
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    assert trainer.model(**batch, fused_lm_head=True).log_probs.count_nonzero() == 4
    with pytest.raises(UsageError, match=words):
        trainer.model(**batch | changes, fused_lm_head=True)


def test_a_mixture_of_experts_with_a_router_loss_is_refused(tiny_config, new, tmp_path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
    config = AutoConfig.for_model(**tiny_config("qwen3_moe", **sizes))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    with pytest.raises(UsageError, match=r"router_aux_loss_coef=0\.001 cannot be done in chunks"):
        new_trainer("dpo", tmp_path / "moe", tmp_path / "out", CHUNKS, dtype=torch.float32)
