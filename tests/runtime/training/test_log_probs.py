"""`Executor.log_probs`: a trainer's own loss of log-probabilities has the gradients of whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize(("chunk_size", "k"), [(8, 1), (8, 3), (64, 1)])
def test_sequences_that_share_prefixes_run_these_once_and_have_the_same_gradients(chunk_size, k, new_model):
    """Also one that is there twice, one that is another's beginning, and targets that only one of two has."""
    stem = [*range(5, 55)]
    ids = [
        [*stem, 1, 2, 3, 4],
        [*stem, 1, 2, 9, 9, 9, 9, 9],
        [*stem, 1, 2, 3, 4],
        stem,
        [*stem[:40], 60, 61],
        [7, 7, 7],
    ]
    firsts = [12, 12, 12, 12, 4, 1]
    sequences = [(np.array(each), np.arange(len(each)) >= first) for each, first in zip(ids, firsts, strict=True)]
    found, num_tokens = [], []
    for share_prefixes in (False, True):
        model = new_model()
        executor = Executor.from_model(model)
        seen: list[int] = []
        model.model.layers[0].register_forward_pre_hook(lambda _, given, to=seen: to.append(given[0].shape[1]))
        with evaluate_in_float64(model), torch.no_grad():
            executor.log_probs(*as_tensors(sequences), chunk_size=chunk_size, k=k, share_prefixes=share_prefixes)
        num_tokens.append(sum(seen))
        with evaluate_in_float64(model):
            given = executor.log_probs(
                *as_tensors(sequences), chunk_size=chunk_size, k=k, share_prefixes=share_prefixes
            )
            value = with_entropy_bonus(tokens_of(given, sequences))
            value.backward()
        found.append((given, value, gradients_of(model)))
    (apart, of_apart, reference), (shared, of_shared, gradients) = found
    torch.testing.assert_close(shared.log_probs, apart.log_probs, rtol=1e-12, atol=1e-12)
    assert of_shared.item() == pytest.approx(of_apart.item(), rel=1e-12)
    assert_same_gradients(gradients, reference)
    assert max(seen) <= chunk_size and num_tokens == [260, 107]


def test_all_that_is_asked_for_is_what_logits_over_the_temperature_give(new_model, random_sequences):
    """And within torch.no_grad nothing has a gradient."""
    sequences = random_sequences(LENGTHS)
    model = new_model()
    with evaluate_in_float64(model), torch.no_grad():
        logits = [model(torch.from_numpy(ids).long()[None]).logits[0, :-1] / 0.7 for ids, _ in sequences]
        found = Executor.from_model(model).log_probs(
            *as_tensors(sequences), chunk_size=8, temperature=0.7, with_more=True
        )
    masks = [torch.from_numpy(mask[1:]) for _, mask in sequences]
    rows = torch.cat([each[mask] for each, mask in zip(logits, masks, strict=True)])
    ids = torch.cat([torch.from_numpy(ids[1:]).long()[mask] for (ids, _), mask in zip(sequences, masks, strict=True)])
    log_probs = rows.log_softmax(1)
    expected = {
        "log_probs": log_probs.gather(1, ids[:, None])[:, 0],
        "entropies": -(log_probs.exp() * log_probs).sum(1),
        "log_sum_squares": log_probs.exp().square().sum(1).log(),
        "mean_logits": rows.mean(1),
        "is_top": ids == rows.argmax(1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-12, atol=1e-12)
        assert not getattr(found, name).requires_grad


def test_gradients_over_a_temperature_are_those_of_whole_sequences(new_model, random_sequences):
    sequences = random_sequences([19, 8])
    model, whole = new_model(), new_model()
    with evaluate_in_float64(model), evaluate_in_float64(whole):
        found = Executor.from_model(model).log_probs(*as_tensors(sequences), chunk_size=8, temperature=1.7)
        (found.log_probs.square().sum() - found.entropies.sum()).backward()
        head = whole.lm_head.forward
        whole.lm_head.forward = lambda hidden: head(hidden) / 1.7
        log_probs, entropies, *_ = log_probs_of(whole, sequences)
        (log_probs.square().sum() - entropies.sum()).backward()
    assert_same_gradients(gradients_of(model), gradients_of(whole))


def test_adapters_that_are_off_are_off_in_chunks(new_model, random_sequences):
    sequences = random_sequences(LENGTHS)
    adapted = with_adapters(new_model(), init_lora_weights=False)
    executor, base = Executor.from_model(adapted), Executor.from_model(new_model())
    with torch.no_grad():
        expected = base.log_probs(*as_tensors(sequences), chunk_size=8).log_probs
        assert not torch.allclose(executor.log_probs(*as_tensors(sequences), chunk_size=8).log_probs, expected)
        with adapted.disable_adapter():
            found = executor.log_probs(*as_tensors(sequences), chunk_size=8).log_probs
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_dropout_is_the_same_in_both_passes_of_a_call_and_another_in_the_next(new_model, random_sequences):
    """So that the derivative of a loss along its own gradient is that gradient's square, over the noise of one call."""
    tokens = as_tensors(random_sequences([19, 8]))

    def loss_at(shift, number=0):
        model = new_model("gpt2", attn_pdrop=0.0, resid_pdrop=0.2).train()
        executor = Executor.from_model(model, seed=3)
        for _ in range(number):
            executor.log_probs(*tokens, chunk_size=8)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight += shift.get(name, 0.0)
        loss = executor.log_probs(*tokens, chunk_size=8, k=2).log_probs.square().sum()
        loss.backward()
        return loss.item(), gradients_of(model)

    value, gradients = loss_at({})
    size = sum(each.square().sum().item() for each in gradients.values())
    step = 1e-6 / size
    values = [loss_at({name: sign * step * each for name, each in gradients.items()})[0] for sign in (1, -1)]
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(size, rel=1e-5)
    assert loss_at({}, number=1)[0] != value


def test_a_batch_without_targets_has_gradients_of_zeros(new_model):
    """As in autograd: an optimizer goes on with its momentum."""
    model = new_model()
    ids, nothing = [torch.tensor([1, 2, 3])], [torch.zeros(3, dtype=torch.bool)]
    found = Executor.from_model(model).log_probs(ids, nothing, chunk_size=8)
    assert found.log_probs.shape == (0,)
    found.log_probs.sum().backward()
    gradients = gradients_of(model)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(each.any() for each in gradients.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0}, "temperature is 0, expected a number above 0"),
        ({"chunk_size": 0}, "chunk-size is 0"),
        ({"bogus": 1}, "log_probs has no option 'bogus'"),
        ({"pp": 2}, "log_probs has no option 'pp'"),
        ({"sequences": [torch.tensor([1.0, 2, 3])]}, "torch.float32"),
        ({"targets": []}, "1 sequence with targets of 0"),
        ({"sequences": [torch.tensor([1, 2, 97])]}, "token 2 of sequence 0 is id 97, the model's vocabulary has 97"),
        ({"targets": [torch.ones(2, dtype=torch.bool)]}, "sequence 0 has tokens of shape"),
        ({"targets": [torch.ones(3)]}, "torch.float32"),
    ],
)
def test_what_is_not_tokens_and_targets_is_refused_by_name(changes, words, new_model):
    given = {"sequences": [torch.tensor([1, 2, 3])], "targets": [torch.ones(3, dtype=torch.bool)], "chunk_size": 8}
    with pytest.raises(UsageError, match=words):
        Executor.from_model(new_model()).log_probs(**given | changes)
