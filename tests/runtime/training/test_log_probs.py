"""`Executor.log_probs`: a trainer's own loss of log-probabilities has the gradients of whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan.errors import UsageError
from chunkplan_runtime import Executor, TargetTokens
from chunkplan_runtime.models.parts import evaluate_in_float64
from tests.support.hf_cases import assert_same_gradients, with_adapters
from tests.support.step_loss_cases import entropies_alone, gradients_of, log_probs_of, preference, with_entropy_bonus

LENGTHS = [30, 1, 11, 23, 7, 3]


@pytest.fixture
def new_model(tiny_config):
    def make(model_type="llama", **changes):
        torch.manual_seed(1)
        config = AutoConfig.for_model(**tiny_config(model_type, **changes))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64)

    return make


def as_tensors(sequences):
    return [torch.from_numpy(ids.copy()) for ids, _ in sequences], [torch.from_numpy(mask) for _, mask in sequences]


def tokens_of(found, sequences):
    ids = [number for number, (_, mask) in enumerate(sequences) for _ in range(int(mask[1:].sum()))]
    positions = torch.cat([torch.from_numpy(mask[1:].nonzero()[0]) + 1 for _, mask in sequences])
    present, which = torch.tensor(ids).unique(return_inverse=True)
    return TargetTokens(found.log_probs, found.entropies, present, which, positions)


@pytest.mark.parametrize("loss", [preference, with_entropy_bonus, entropies_alone])
@pytest.mark.parametrize(("chunk_size", "k"), [(8, 1), (8, 3), (64, 1)])
def test_a_loss_of_one_s_own_has_the_value_and_gradients_of_whole_sequences(
    loss, chunk_size, k, new_model, random_sequences
):
    sequences = random_sequences(LENGTHS)
    model, whole = new_model(), new_model()
    with evaluate_in_float64(whole):
        log_probs, entropies, ids, positions = log_probs_of(whole, sequences)
        present, which = ids.unique(return_inverse=True)
        expected = loss(TargetTokens(log_probs, entropies, present, which, positions)) / 3
        expected.backward()
    executor = Executor.from_model(model)
    with evaluate_in_float64(model):
        found = executor.log_probs(*as_tensors(sequences), chunk_size=chunk_size, k=k)
        value = loss(tokens_of(found, sequences)) / 3
        value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(gradients_of(model), gradients_of(whole))
