"""A plan is joined with the tokens it was built for, and with no others."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from chunkplan import PlanConfig, build
from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.stream import PlanStream, open_plan

IDS = np.arange(10)
TARGET = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1], bool)
CHUNKS = [[(0, 0, 4)], [(1, 0, 3), (0, 4, 8)], [(0, 8, 10)], []]


@pytest.fixture(scope="module")
def written(handmade_plan):
    return handmade_plan([(IDS, TARGET), (IDS[:3] + 20, TARGET[:3])], [{0: CHUNKS}])


def stream(written, vocab_size=97, max_positions=10):
    return PlanStream(*open_plan(*written), vocab_size=vocab_size, max_positions=max_positions)


def test_chunks_hold_the_tokens_positions_and_shifted_labels_of_their_segments(written):
    opened = stream(written)
    ((step, (work,)),) = list(opened)
    loaded = [opened.load(work.chunks[chunk]) for chunk in range(4)]
    assert [chunk.input_ids.tolist() for chunk in loaded] == [
        [[0, 1, 2, 3]],
        [[20, 21, 22, 4, 5, 6, 7]],
        [[8, 9]],
        [[0]],
    ]
    assert [chunk.position_ids.tolist() for chunk in loaded] == [
        [[0, 1, 2, 3]],
        [[0, 1, 2, 4, 5, 6, 7]],
        [[8, 9]],
        [[0]],
    ]
    assert [chunk.labels.tolist() for chunk in loaded] == [
        [-100, 2, 3, -100],
        [-100, 22, -100, 5, 6, 7, -100],
        [9, -100],
        [-100],
    ]
    assert [[(span.first, span.last, span.is_split) for span in chunk.spans] for chunk in loaded] == [
        [(0, 4, True)],
        [(0, 3, False), (3, 7, True)],
        [(0, 2, True)],
        [(0, 1, False)],
    ]
    assert step.num_target_tokens == 7


def test_the_analysis_is_found_where_the_plan_says(written):
    plan, analysis = written
    assert open_plan(plan)[1].path.resolve() == analysis.resolve()


def test_another_analysis_is_refused_with_both_hashes(written, handmade_plan):
    _, other = handmade_plan([(IDS + 1, TARGET), (IDS[:3], TARGET[:3])], [{0: CHUNKS}])
    plan, own = open_plan(*written)
    with pytest.raises(DataError, match=f"plan has {own.content_hash[:12]}") as raised:
        open_plan(plan.path, other)
    assert raised.value.hint


def test_an_analysis_that_is_gone_is_named(written, tmp_path):
    plan = shutil.copytree(written[0], tmp_path / "elsewhere" / "plan")
    with pytest.raises(UsageError, match=r"the analysis of the plan .* is not at"):
        open_plan(plan)
    assert open_plan(plan, written[1])[1].num_sequences == 2


def test_lengths_without_tokens_cannot_be_trained_on(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5, 9]))
    build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=4, k=1))
    with pytest.raises(UsageError, match="holds lengths only"):
        stream((tmp_path / "plan",))


def test_a_plan_of_several_stages_is_refused(handmade_plan):
    written = handmade_plan([(IDS, TARGET)], [{0: [[(0, 0, 10)]]}], pp=2)
    with pytest.raises(UsageError, match="2 pipeline stages") as raised:
        open_plan(*written)
    assert "--pp 1" in raised.value.hint


def test_a_sequence_longer_than_the_model_takes_is_refused_at_once(written):
    with pytest.raises(UsageError, match="sequence 0 has 10 tokens, the model takes 9 positions"):
        stream(written, max_positions=9)


def test_a_vocabulary_too_small_for_the_data_is_refused_at_once(written):
    with pytest.raises(UsageError, match="the data has token id 22, the model's vocabulary has 22"):
        stream(written, vocab_size=22)


def test_a_token_outside_of_the_vocabulary_is_refused_whatever_the_manifest_says(written):
    plan, analysis = open_plan(*written)
    analysis.manifest["max_token_id"] = 3
    opened = PlanStream(plan, analysis, vocab_size=22, max_positions=10)
    ((_, (work,)),) = list(opened)
    assert opened.load(work.chunks[0]).input_ids.shape == (1, 4)
    with pytest.raises(UsageError, match="token 2 of sequence 1 is id 22, the model's vocabulary has 22"):
        opened.load(work.chunks[1])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [((7, 0, 3), "no sequence 7"), ((1, 0, 4), "asks for 0 to 4"), ((1, 1, 3), "counted 3 with 1")],
)
def test_a_plan_that_asks_for_other_tokens_is_refused(written, chunk, message):
    from dataclasses import replace

    from chunkplan.planfile.plan import Segment

    opened = stream(written)
    ((_, (work,)),) = list(opened)
    asked = replace(work.chunks[1], num_tokens=3, num_target_tokens=1, segments=(Segment(*chunk),))
    with pytest.raises(DataError, match=message):
        opened.load(asked)
