"""A sequence that a step has twice counts twice, exactly as two sequences of the same tokens would."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig

from chunkplan.errors import DataError
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.parity import compare_plan
from tests.support.alive import store_bytes

LENGTHS = [23, 4, 9]


def chunks(copy_of_0=0, copy_of_2=2):
    """Two groups of sequence 0, each cut in its own way, and sequence 2 twice in one chunk; 1 occurs once."""
    return [
        [(0, 0, 6)],
        [(copy_of_0, 0, 8), (1, 0, 4)],
        [(0, 6, 14)],
        [(copy_of_0, 8, 16)],
        [(2, 0, 9), (copy_of_2, 0, 9)],
        [(copy_of_0, 16, 20)],
        [(0, 14, 23)],
        [(copy_of_0, 20, 23)],
    ]


def interleaved(k):
    """All forwards in the order of the chunks, then all backwards in the opposite one: both groups are in flight."""
    parts_after = {0: 2, 2: 1, 6: 0, 1: 3, 3: 2, 5: 1, 7: 0, 4: 0}
    forwards = [("forward" if parts_after[chunk] < k else "forward_kv", chunk) for chunk in range(8)]
    backwards = []
    for chunk in range(7, -1, -1):
        backwards += [("recompute", chunk)] * (parts_after[chunk] >= k) + [("backward", chunk)]
    return forwards + backwards


@pytest.fixture
def model(tiny_config):
    return new_model(AutoConfig.for_model(**tiny_config("qwen2")), torch.float64, seed=3)


@pytest.fixture
def run(model):
    """Runs the only step of a plan; returns loss, gradients and the most bytes that were in the store."""

    def run(plan, analysis):
        stream = PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)
        (work,) = list(stream)
        executor, held = RankExecutor(model), []

        def around(action):
            held.append(store_bytes(executor.stores[0]))
            return nullcontext()

        loss = executor.run(work.ranks[0], work.step.num_target_tokens, around).loss
        assert executor.stores[0].is_empty
        gradients = {name: parameter.grad for name, parameter in model.model.named_parameters()}
        model.model.zero_grad(set_to_none=True)
        return loss, gradients, max(held)

    return run


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize("one_after_another", [False, True])
def test_a_repeated_sequence_has_the_gradients_of_two_equal_ones(
    k, one_after_another, run, model, handmade_plan, random_sequences
):
    actions = None if one_after_another else interleaved(k)
    sequences = random_sequences(LENGTHS)
    twins = [*sequences, sequences[0], sequences[2]]
    repeated = handmade_plan(sequences, [{0: chunks()}], k=k, actions=actions)
    distinct = handmade_plan(twins, [{0: chunks(copy_of_0=3, copy_of_2=4)}], k=k, actions=actions)

    loss, gradients, held = run(*repeated)
    twin_loss, twin_gradients, twin_held = run(*distinct)
    assert loss == twin_loss
    assert all(torch.equal(gradients[name], twin_gradients[name]) for name in gradients)
    assert held == twin_held

    report, twin_report = compare_plan(*repeated, model), compare_plan(*distinct, model)
    assert report.max_relative_error <= 1e-12
    assert twin_report.max_relative_error <= 1e-12
    assert report.reference_loss == pytest.approx(twin_report.reference_loss, rel=1e-14)


def test_groups_cut_alike_keep_apart(model, handmade_plan, random_sequences):
    cut = [[(0, 0, 8)], [(0, 0, 8)], [(0, 8, 16)], [(0, 8, 16)], [(0, 16, 23), (2, 0, 9)], [(0, 16, 23), (1, 0, 4)]]
    forwards = [("forward_kv", chunk) for chunk in range(4)] + [("forward", 4), ("forward", 5)]
    backwards = [("backward", 4), ("recompute", 2), ("backward", 2), ("backward", 5), ("recompute", 3)]
    backwards += [("backward", 3), ("recompute", 1), ("recompute", 0), ("backward", 0), ("backward", 1)]
    written = handmade_plan(random_sequences(LENGTHS), [{0: cut}], k=1, actions=forwards + backwards)
    assert compare_plan(*written, model).max_relative_error <= 1e-12


def test_a_part_twice_in_a_chunk_is_refused(run, handmade_plan, random_sequences):
    actions = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    written = handmade_plan(random_sequences(LENGTHS), [{0: [[(0, 0, 8), (0, 0, 8)], [(0, 8, 23)]]}], actions=actions)
    with pytest.raises(DataError, match="the backward of tokens 0 to 8 of sequence 0 is out of order"):
        run(*written)


def test_a_part_twice_in_a_group_is_refused():
    store, part = KVStore(page_tokens=8), Span(0, 0, 8, length=8, chunk_start=0, group_id=1)
    store.start_forward(part)
    store.start_backward(part)
    store.finish_backward(part)
    with pytest.raises(DataError, match="or this one had its own"):
        store.start_backward(part)
