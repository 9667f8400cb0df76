"""Ways to train without chunks: what each computes on tiny inputs, by hand, and the settings that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chunkplan.cost.checkpointing import CHECKPOINTINGS, levels_of, shown_levels
from chunkplan.tuning.baselines import Baseline, _dealt, _packed, _padded, baselines
from chunkplan.tuning.options import BASELINES, LADDER, TuneOptions
from chunkplan.tuning.sampling import sample_steps
from chunkplan.tuning.tune import tune
from tests.support.tuning_cases import GIB, long_tail, options_with

WHOLE = options_with().shape.attention_patterns


def rows_of(tokens: list[int] | np.ndarray, options: TuneOptions) -> list[Baseline]:
    layouts = options.baseline_layouts()
    config = options.plan_config(layouts[0], 8192, 1, options.schedules_of(layouts[0])[0])
    sample = sample_steps(np.array(tokens, np.int32), config, options.cost(layouts[0], LADDER[0]), 100)
    return list(baselines(sample, options, layouts, lambda *done: None))


def pairs(*lengths: int) -> int:
    """A token attends to itself and all before it; half of what is seen without a mask is counted for each pair."""
    return sum(length * length for length in lengths)


def test_micro_batches_are_what_a_hand_makes_of_four_sequences() -> None:
    """Padded: each pair to the longer; packed by best fit, the longest first: 500, 300 + 200 and what is left."""
    tokens = np.array([300, 500, 200, 100], np.int64)
    rows, row_pairs = _padded(2)(tokens, WHOLE)
    assert rows.tolist() == [2 * 500, 2 * 200]
    assert row_pairs.tolist() == [2 * pairs(500), 2 * pairs(200)]
    packed, packed_pairs = _packed(500)(tokens, WHOLE)
    assert packed.tolist() == [500, 500, 100]
    assert packed_pairs.tolist() == [pairs(500), pairs(300, 200), pairs(100)]
    cut, cut_pairs = _packed(250)(tokens, WHOLE)
    assert sorted(cut.tolist()) == [100, 200, 250, 250]
    assert cut_pairs.sum() == pairs(250, 250, 200, 100)


def test_each_group_of_ranks_packs_its_own_share_as_loaders_deal_it() -> None:
    """Every second sequence is one group's; where two ranks share them, to be cut into four slices, which are equal."""
    options = options_with(tp=1, pp=1, dp=4, schedules=None, global_batch=5)
    [layout] = options.layouts()
    config, cost = options.plan_config(layout, 8192, 1, "algorithm2"), options.cost(layout, LADDER[0])
    sample = sample_steps(np.array([301, 502, 203, 104, 55], np.int32), config, cost, 1)
    order = sample.num_tokens.tolist()
    deal = _dealt(_packed(2048), sample, options)
    alone, shared = deal(4, 1), deal(2, 2)
    assert [tokens.tolist() for tokens, _ in alone] == [[sum(order[group::4])] for group in range(4)]
    padded = [-(-each // 4) * 4 for each in order]
    assert [tokens.tolist() for tokens, _ in shared] == [[sum(padded[group::2])] for group in range(2)]
    assert [each.tolist() for _, each in shared] == [[pairs(*padded[group::2])] for group in range(2)]
    assert deal(8, 1)[5][0].tolist() == [0], "there are fewer sequences than ranks"


def test_what_is_cut_off_is_lost_and_not_counted_among_the_tokens_a_second() -> None:
    """One step of 3,000 and 1,000 tokens, cut to 2,048: 952 of 4,000 are lost."""
    options = options_with(tp=1, pp=1, dp=1, schedules=None, global_batch=2, gpu_memory=1000 * GIB)
    *whole, cut = rows_of([3000, 1000], options)
    assert [row.lost for row in whole] == [0] * len(whole)
    assert (cut.largest, cut.lost) == (2048, pytest.approx(952 / 4000))
    for row in (*whole, cut):
        assert row.tokens_per_second == pytest.approx(4000 * (1 - row.lost) / (row.step_ns / 1e9))


def test_every_way_has_a_key_and_its_own_settings() -> None:
    """Context parallelism shares micro-batches, Megatron layers too, ZeRO-3 runs everything again in data parallel."""
    rows = {row.key: row for row in rows_of(long_tail(400, 30_000), options_with(tp=1, pp=1, gpus=8, schedules=None))}
    assert set(rows) == set(BASELINES)
    assert rows["packed"].cp == rows["packed"].layout.tp == 1
    assert rows["context-parallel"].cp > 1 == rows["context-parallel"].layout.tp
    assert rows["megatron"].layout.tp > 1
    zero_3 = rows["zero-3"]
    assert (zero_3.layout, zero_3.sharding) == ((8, 1, 1), "weights")
    assert zero_3.checkpointing in ("full", "offload")
    assert zero_3.step_ns >= rows["packed"].step_ns, "the other may choose the same"


def test_the_best_degree_of_context_parallelism_is_taken() -> None:
    """No smaller number of GPUs to a group, nor a larger one, is faster: each is what it would be alone."""
    tokens = long_tail(400, 30_000)
    options = options_with(tp=1, pp=1, gpus=8, schedules=None, gpu_memory=1000 * GIB)
    [row] = [row for row in rows_of(tokens, options) if row.key == "context-parallel"]
    assert row.fits
    for gpus in (2, 4):
        [fewer] = [each for each in rows_of(tokens, replace(options, gpus=gpus)) if each.key == "context-parallel"]
        assert fewer.step_ns > row.step_ns


def test_no_more_layers_are_checkpointed_than_memory_asks_for() -> None:
    """One GPU: with the stronger level in one layer fewer it would not fit; with more room fewer have it."""
    tokens, counts = [40_000, 9_000], []
    for memory in (40, 48):
        options = options_with(tp=1, pp=1, dp=1, schedules=None, global_batch=2, lora_rank=16)
        options = replace(options, gpu_memory=memory * GIB)
        [row] = [each for each in rows_of(tokens, options) if each.key == "packed"]
        assert row.fits
        levels = levels_of(row.checkpointing, 28)
        strongest = max(levels, key=CHECKPOINTINGS.index)
        counts.append((CHECKPOINTINGS.index(strongest), levels.count(strongest)))
        assert list(levels) == sorted(levels, key=CHECKPOINTINGS.index, reverse=True), "the first layers of the stage"
        if levels.count(strongest) < 28:
            assert shown_levels(levels) == row.checkpointing
            assert row.memory.total + row.memory.activations / 28 > options.gpu_memory * 0.97, "hardly any room is left"
    assert counts[0] > counts[1]


def test_a_gain_may_be_against_a_way_that_is_named(lengths: Path) -> None:
    options = options_with(chunk_sizes=(8192,), ks=(1,))
    plain, named = (tune(lengths, replace(options, baseline=name)) for name in (None, "single"))
    assert plain.best_baseline is not None and named.best_baseline is not None
    assert named.best_baseline.key == "single"
    assert named.gain == pytest.approx(named.best_baseline.step_ns / named.best.step_ns)
    assert plain.best_baseline.step_ns <= named.best_baseline.step_ns
