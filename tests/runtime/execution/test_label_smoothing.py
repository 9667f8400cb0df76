"""Label smoothing is torch's own on whole sequences, in loss and gradients; evaluation has none."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.loss import cross_entropy
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.proof.prove import relative_errors, take_gradients, vanishing_gradients
from chunkplan_runtime.train import main
from tests.support.training_cases import all_well
from tests.support.training_checks import lines, options, same_run

CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]


def whole(model, sequences, smoothing):
    """Loss and gradients of plain training, all sequences whole."""
    num_targets = sum(int(target.sum()) for _, target in sequences)
    total = 0.0
    for ids, target in sequences:
        tokens, predicted = torch.tensor(ids.astype("int64")), torch.tensor(target)[1:]
        logits = model.model(tokens[None], use_cache=False).logits[0, :-1]
        labels = torch.where(predicted, tokens[1:], -100)
        loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) / num_targets
        loss.backward()
        total += loss.item()
    return total, take_gradients(model)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    ("kind", "more"),
    [("qwen2", {"tie_word_embeddings": True}), ("gemma2", {"final_logit_softcapping": 2.0, "sliding_window": 64})],
)
def test_it_is_exact_in_chunks_and_in_blocks_of_the_head(
    monkeypatch, tiny_config, handmade_plan, random_sequences, kind, more, k
):
    monkeypatch.setattr("chunkplan.cost.optimizers.LOGITS_AT_ONCE", 4 * 97)
    model = new_model(AutoConfig.for_model(**tiny_config(kind, **more)), torch.float64, seed=3)
    sequences = random_sequences([23, 4, 9])
    plan, analysis = handmade_plan(sequences, [{0: CHUNKS}], k=k)
    work = next(iter(PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)))
    ours = model.config._attn_implementation
    with evaluate_in_float64(model.model):
        model.model.set_attn_implementation("eager")
        (plain, _), (expected, reference) = (whole(model, sequences, smoothing) for smoothing in (0.0, 0.2))
        model.model.set_attn_implementation(ours)
        executor = RankExecutor(model, loss=cross_entropy(0.2))
        loss = executor.run(work.ranks[0], work.step.num_target_tokens).loss
        gradients = take_gradients(model)
        evaluated = executor.evaluate(work.ranks[0], work.step.num_target_tokens).loss
    assert loss == pytest.approx(expected, rel=1e-13) and abs(loss - plain) > 1e-3
    assert max(relative_errors(gradients, reference, vanishing_gradients(reference)).values()) <= 1e-12
    assert evaluated == pytest.approx(plain, rel=1e-13)


@pytest.mark.soak
def test_four_processes_smooth_as_one_does(made, trainers, tmp_path):
    more = ("--device", "cpu", "--max-steps", 3, "--label-smoothing", 0.2, "--save-every", 0)
    assert main(options(made, tmp_path / "plain", *more, "--label-smoothing", 0, plan="one")) == 0
    assert main(options(made, tmp_path / "one", *more, plan="one")) == 0
    all_well(trainers, 4, options(made, tmp_path / "both", *more, plan="both"))
    same_run(tmp_path / "one", tmp_path / "both", tolerance=1e-4)
    first, plain = (lines(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("one", "plain"))
    assert abs(first - plain) > 1e-4
