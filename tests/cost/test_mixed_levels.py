"""Levels of activation checkpointing layer by layer: how they are written, and what times and memory make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chunkplan.cost.activations import around_of_stages
from chunkplan.cost.checkpointing import CHECKPOINTINGS, checkpointing_words, levels_of, shown_levels
from chunkplan.cost.durations import attention_pairs_of, durations, work_ns
from chunkplan.cost.memory import memory_rates, stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.errors import DataError, UsageError
from chunkplan.operations import OPS
from chunkplan.options import options_of
from tests.support.plain import plain_cost

LAYERS = (7, 7, 7, 7)
MIXED = "full:7,keep-products:3,none:18"
COST = plain_cost(checkpointing=MIXED)
TOKENS = np.array([8192, 100])
PAIRS = attention_pairs_of(TOKENS, np.array([65536, 0]))


def test_runs_of_layers_are_read_as_they_are_written():
    levels = levels_of(MIXED, 28)
    assert levels[:7] == ("full",) * 7 and levels[7:10] == ("keep-products",) * 3 and set(levels[10:]) == {"none"}
    assert shown_levels(levels) == MIXED
    assert [shown_levels(levels_of(level, 28)) for level in CHECKPOINTINGS] == list(CHECKPOINTINGS)
    assert options_of(CostModel)["checkpointing"].read("full:7, keep-products:3,none:18") == MIXED


@pytest.mark.parametrize("typed", ["", "some", "full:", "full:0", "full:7,", "full:7 none:21", "28", "full,none:3"])
def test_other_text_is_refused(typed):
    with pytest.raises(UsageError, match="runs of layers such as full:8,none:20"):
        options_of(CostModel)["checkpointing"].read(typed)


def test_runs_of_other_layers_than_there_are_are_refused():
    """With a hint that is of as many as there are."""
    for written, similar in (
        ("full:7,none:20", "full:8,none:20"),
        ("full:1", "full"),
        ("full:20,none:20", "full:14,none:14"),
    ):
        with pytest.raises(UsageError, match="layers: the model has 28") as refused:
            plain_cost(checkpointing=written)
        hint = refused.value.hint
        assert hint == f"give runs whose numbers sum to 28, such as --checkpointing {similar}"
        assert plain_cost(checkpointing=similar).levels
    entries = COST.to_dict() | {"checkpointing": "full:7,none:20"}
    with pytest.raises(DataError, match="of 27 layers"):
        CostModel.from_dict(entries, where="manifest.json")


def test_a_cost_model_is_read_back_with_its_levels():
    assert CostModel.from_dict(COST.to_dict(), where="") == COST


def test_levels_are_said_in_words():
    full = "full activation checkpointing"
    assert checkpointing_words("full:8,none:10,full:2,none:8") == [f"{full} in 10 of 28 layers"]
    assert checkpointing_words("full:1,none:1,keep-attention:1,keep-products:1") == [
        f"{full} in 1 of 4 layers, selective in others"
    ]
    assert checkpointing_words("keep-attention:1,keep-products:3") == ["selective checkpointing by layer"]
    assert checkpointing_words(MIXED)[0].startswith(full)
    assert checkpointing_words("none:28") == []


def times_of(checkpointing):
    return durations(TOKENS, PAIRS, replace(COST, checkpointing=checkpointing).rates, LAYERS)


def test_a_model_stage_takes_what_its_own_layers_run_again():
    """Stages of one level take as long as where all have it, and a mixed one lies between: by its layers."""
    mixed, full, none, products = map(times_of, (MIXED, "full", "none", "keep-products"))
    np.testing.assert_array_equal(mixed[:, 0], full[:, 0])
    np.testing.assert_array_equal(mixed[:, 2:], none[:, 2:])
    np.testing.assert_allclose(mixed[:, 1], (3 * products[:, 1] + 4 * none[:, 1]) / 7, atol=1)


def test_the_work_of_all_stages_is_the_work_of_the_chunk():
    backward = times_of(MIXED)[[OPS.index("forward"), OPS.index("backward")]].sum(axis=(0, 1))
    overhead = COST.chunk_ns
    np.testing.assert_allclose(backward, work_ns(COST, TOKENS, PAIRS) + overhead, rtol=1e-6)


def test_a_stage_holds_what_its_own_layers_hold():
    """Beside what is around its layers, which the first of them may keep itself."""

    def held(checkpointing):
        cost = replace(COST, checkpointing=checkpointing)
        found = memory_rates(cost, 4, LAYERS, 8192).tokens.copy()
        found[:, 0] -= around_of_stages(cost, LAYERS)
        return found

    mixed, full, none, products = map(held, (MIXED, "full", "none", "keep-products"))
    np.testing.assert_array_equal(mixed[0], full[0])
    np.testing.assert_array_equal(mixed[2:], none[2:])
    np.testing.assert_allclose(mixed[1, 0], (3 * products[1, 0] + 4 * none[1, 0]) / 7)


def test_what_waits_between_halves_counts_at_its_most():
    """The half for inputs comes to the last layers first: where these held little, it holds more before less."""
    weak_last, strong_last = (
        memory_rates(plain_cost(checkpointing=levels), 1, (28,), 8192).tokens[0, 3]
        for levels in ("full:4,none:24", "none:24,full:4")
    )
    full = memory_rates(plain_cost(checkpointing="full"), 1, (28,), 8192).tokens[0, 3]
    assert weak_last == 0
    assert strong_last == pytest.approx(full * 4 / 28)


def test_the_backward_of_any_layer_that_runs_again_has_room():
    def working(checkpointing):
        cost = replace(COST, checkpointing=checkpointing)
        stages = stage_memory(cost, dp=1, layers=LAYERS, held=[ResidentTokens()] * 4, chunk_size=8192)
        return [stage.activations for stage in stages]

    mixed, full, none, products = map(working, (MIXED, "full", "none", "keep-products"))
    assert mixed == [full[0], max(products[1], none[1]), none[2], none[3]]
