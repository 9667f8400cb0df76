"""A stream hands out every step once, in order, from its position on, whoever iterates and however far it reads ahead.

The steps before a damaged one come through, and no thread outlives its iteration.
"""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from chunkplan.errors import UsageError
from chunkplan_runtime.feed.stream import PlanStream, open_plan

NUM_STEPS = 6


@pytest.fixture(scope="module")
def written(handmade_plan):
    """Step i trains sequence i, whose token ids are i + 1."""
    sequences = [(np.full(4, step + 1), np.array([False, True, True, True])) for step in range(NUM_STEPS)]
    return handmade_plan(sequences, [{0: [[(step, 0, 4)]]} for step in range(NUM_STEPS)])


@pytest.fixture(params=[0, 1, 2, 50], ids="prefetch {}".format)
def stream(request, written):
    return PlanStream(*open_plan(*written), vocab_size=97, max_positions=4, prefetch=request.param)


def steps(stream):
    return [work.step.step for work in stream]


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("chunkplan-read-ahead")]


def test_it_is_a_torch_dataset_that_hands_out_all_steps_in_order(stream):
    assert isinstance(stream, IterableDataset)
    assert len(stream) == stream.num_steps == NUM_STEPS
    tokens = [work.ranks[0].tensors[0].input_ids[0, 0].item() for work in stream]
    assert tokens == [1, 2, 3, 4, 5, 6]
    assert len(stream) == 0
    assert steps(stream) == []


def test_the_position_is_the_consumers_whatever_was_read_ahead(stream):
    iteration = iter(stream)
    for expected in range(3):
        assert next(iteration).step.step == expected
        assert stream.state_dict()["step"] == expected + 1
    assert (len(stream), stream.num_steps) == (3, 6)
    iteration.close()
    assert steps(stream) == [3, 4, 5]


def test_another_stream_goes_on_from_a_saved_position(stream, written, tmp_path):
    for work in stream:
        if work.step.step == 3:
            break
    torch.save(stream.state_dict(), tmp_path / "position.pt")
    other = PlanStream(*open_plan(*written), vocab_size=97, max_positions=4)
    other.load_state_dict(torch.load(tmp_path / "position.pt"))
    assert steps(other) == [4, 5]
    other.load_state_dict({**other.state_dict(), "step": 0})
    assert steps(other) == [0, 1, 2, 3, 4, 5]


def test_a_position_among_other_samples_is_refused_with_what_differs(stream, handmade_plan):
    ids = np.array([1, 2])
    other = open_plan(*handmade_plan([(ids, ids > 1)], [{0: [[(0, 0, 2)]]}]))
    state = PlanStream(*other, vocab_size=97, max_positions=4).state_dict()
    own = stream.state_dict()
    was, is_now = (each["samples"]["plan.analysis"] for each in (state, own))
    with pytest.raises(UsageError, match=f"of another plan: plan.analysis was {was}, is {is_now}; ") as raised:
        stream.load_state_dict(state)
    assert raised.value.hint
    with pytest.raises(UsageError, match="it does not say which samples its steps have"):
        stream.load_state_dict({"plan": "of an earlier version", "step": 0})
    more = {**own["samples"], "plan.epochs": 2, "plan.seed": 1}
    with pytest.raises(UsageError, match=r"of another plan: plan.seed was 1, is 0; plan.epochs was 2, is 1"):
        stream.load_state_dict({"samples": more, "step": 0})
    assert stream.state_dict() == own


@pytest.mark.parametrize("step", [-1, 7, 2.0, True, None, "2"])
def test_a_position_outside_of_the_plan_is_refused(stream, step):
    with pytest.raises(UsageError, match=r"the position is step .*, the plan has 6 steps"):
        stream.load_state_dict({**stream.state_dict(), "step": step})


def test_a_position_after_the_last_step_has_no_more(stream):
    stream.load_state_dict({**stream.state_dict(), "step": 6})
    assert steps(stream) == []


def test_a_negative_prefetch_is_refused(written):
    with pytest.raises(UsageError, match="prefetch is -1"):
        PlanStream(*open_plan(*written), vocab_size=97, max_positions=4, prefetch=-1)


def test_a_data_loader_without_workers_is_a_plain_loop(stream):
    loader = DataLoader(stream, batch_size=None)
    assert len(loader) == 6
    for work in loader:
        if work.step.step == 1:
            break
    assert stream.state_dict()["step"] == 2
    assert steps(loader) == [2, 3, 4, 5]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_hand_out_every_step_once_with_its_tokens(written, num_workers):
    stream = PlanStream(*open_plan(*written), vocab_size=97, max_positions=4)
    stream.load_state_dict({**stream.state_dict(), "step": 1})
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    here = PlanStream(*open_plan(*written), vocab_size=97, max_positions=4)
    here.load_state_dict(stream.state_dict())
    for work, expected in zip(loader, here, strict=True):
        assert work.step == expected.step
        assert [rank.actions for rank in work.ranks] == [rank.actions for rank in expected.ranks]
        found, tensors = work.ranks[0].tensors[0], expected.ranks[0].tensors[0]
        assert torch.equal(found.input_ids, tensors.input_ids)
        assert torch.equal(found.labels, tensors.labels)
        assert found.spans == tensors.spans


def test_a_new_process_can_be_given_a_stream_that_is_being_read(written):
    """As with workers that are spawned, not forked: what was opened here is opened anew there."""
    stream = PlanStream(*open_plan(*written), vocab_size=97, max_positions=4)
    iteration = iter(stream)
    next(iteration)
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert steps(loader) == [1, 2, 3, 4, 5]
    assert steps(iteration) == [1, 2, 3, 4, 5]


def test_an_error_comes_at_the_step_where_it_belongs(handmade_plan):
    """However far ahead it was found."""
    sequences = [(np.array([step, step + 10]), np.array([False, True])) for step in range(5)]
    plan, analysis = open_plan(*handmade_plan(sequences, [{0: [[(step, 0, 2)]]} for step in range(5)]))
    analysis.manifest["max_token_id"] = 0
    for prefetch in (0, 1, 2, 50):
        stream = PlanStream(plan, analysis, vocab_size=13, max_positions=4, prefetch=prefetch)
        seen = []
        with pytest.raises(UsageError, match="token 1 of sequence 3 is id 13, the model's vocabulary has 13"):
            for work in stream:
                seen.append(work.step.step)
        assert seen == [0, 1, 2]
        assert stream.state_dict()["step"] == 3
        assert not reading_threads()


def test_no_thread_outlives_its_iteration(written):
    """Run to the end, left in the middle, closed, or forgotten."""
    stream = PlanStream(*open_plan(*written), vocab_size=97, max_positions=4, prefetch=2)
    assert not reading_threads()
    for work in stream:
        assert len(reading_threads()) == 1
        if work.step.step == 2:
            break
    assert not reading_threads()
    iteration = iter(stream)
    next(iteration)
    assert len(reading_threads()) == 1
    iteration.close()
    assert not reading_threads()
    iteration = iter(stream)
    next(iteration)
    cycle = [iteration]
    cycle.append(cycle)
    del iteration, cycle
    gc.collect()
    assert not reading_threads()
    assert steps(stream) == [5]
    assert not reading_threads()


def test_without_prefetch_there_is_no_thread(written):
    for _ in PlanStream(*open_plan(*written), vocab_size=97, max_positions=4, prefetch=0):
        assert not reading_threads()
