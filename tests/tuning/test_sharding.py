"""What data-parallel ranks share is chosen with the rest: the fastest that fits, with what that takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.model import SHARDINGS, CostModel, Sharding
from chunkplan.errors import UsageError
from chunkplan.tuning.document import read_tuning, tuned, tuning_document
from chunkplan.tuning.grid import Choice
from chunkplan.tuning.tune import tune
from tests.support.tuning_cases import GIB, options_with

#: Four GPUs of 79 GiB, on which weights, gradients and optimizer states of 7B take 63 GiB with ZeRO-1.
FOUR: dict[str, Any] = {"tp": 1, "dp": 4, "pp": 1, "schedules": None, "cp": "off", "gpu_memory": 79 * GIB}


def of(choices: tuple[Choice, ...], sharding: Sharding) -> list[tuple[PlanConfig, float, bool]]:
    """Those with one level of activation checkpointing for all layers; others are tried where they may be fastest."""
    return [
        (each.config, each.step_ns, each.fits)
        for each in choices
        if each.cost.sharding == sharding and each.cost.checkpointing in CHECKPOINTINGS
    ]


@pytest.mark.soak
def test_what_ranks_share_is_searched_where_memory_binds_and_for_the_fastest(lengths: Path) -> None:
    """Every choice that there is with ZeRO-1 stays; beside them are those that spare recompute, fit at all, or are
    faster for what they share."""
    least = tune(lengths, options_with(**FOUR, sharding="optimizer"))
    found = tune(lengths, options_with(**FOUR))
    assert sorted(map(str, of(found.choices, "optimizer"))) == sorted(map(str, of(least.choices, "optimizer")))
    further = [each for each in found.choices if each.cost.sharding != "optimizer"]
    assert {each.cost.sharding for each in further} == {"gradients", "weights"}
    assert not any(each.cost.sharding == "none" for each in found.choices)
    for each in further:
        same = [one for one in least.choices if one.config == each.config]
        [plain] = [one for one in same if one.cost.checkpointing in CHECKPOINTINGS] or [None]
        if plain is not None and each.fits and each.cost.checkpointing in CHECKPOINTINGS:
            levels = [CHECKPOINTINGS.index(one.cost.checkpointing) for one in (each, plain)]
            assert not plain.fits or levels[0] < levels[1] or (levels[0] == levels[1] and each.step_ns < plain.step_ns)
    shares_more = found.best.cost.sharding != "optimizer"  # only where that is faster, slots and all
    assert found.best.step_ns < least.best.step_ns if shares_more else found.best.step_ns == least.best.step_ns


def test_where_memory_is_no_limit_what_ranks_share_is_what_is_fastest(tmp_path: Path) -> None:
    """As fast as with any of it fixed, with no other choices: with ZeRO-1, as products then add to sums themselves."""
    np.save(tmp_path / "equal.npy", np.full(256, 8192, np.int32))
    wide: dict[str, Any] = FOUR | {"gpu_memory": 1000 * GIB, "chunk_sizes": (4096, 8192), "ks": (1,)}
    found = tune(tmp_path / "equal.npy", options_with(**wide))
    fixed = [tune(tmp_path / "equal.npy", options_with(**wide, sharding=one)) for one in SHARDINGS[1:]]
    assert found.best.step_ns == fixed[0].best.step_ns < min(each.best.step_ns for each in fixed[1:])
    assert [(each.config, each.cost) for each in found.choices] == [
        (each.config, each.cost) for each in fixed[0].choices
    ]
    assert {each.cost.sharding for each in found.choices} == {"optimizer"}


def test_baselines_may_pack_to_more_than_the_longest_where_a_chunk_may_be_as_large(tmp_path: Path) -> None:
    """To four times as much, if that is fastest; not where a ChunkSize is no larger than the longest sequence."""
    np.save(tmp_path / "short.npy", np.random.default_rng(0).integers(64, 1024, 4096).astype(np.int32))
    named = []
    for chunk_size in (1024, 4096):
        options = options_with(**FOUR | {"gpu_memory": 1000 * GIB}, chunk_sizes=(chunk_size,), ks=(1,))
        [row] = [each for each in tune(tmp_path / "short.npy", options).baselines if each.key == "packed"]
        named.append((row.name, row.largest <= chunk_size))
    assert named == [("packed to the longest", True), ("packed to 4 times the longest", True)]


def test_where_nothing_fits_otherwise_sharded_weights_are_recommended(lengths: Path, tmp_path: Path) -> None:
    """Two GPUs: ZeRO-1 keeps 88 GiB of states. The plan that `build --auto` makes has what was chosen."""
    small = options_with(**FOUR | {"dp": 2, "gpu_memory": 80 * GIB}, sharding="optimizer")
    with pytest.raises(UsageError, match="nothing fits"):
        tune(lengths, small)
    found = tune(lengths, replace(small, sharding="auto"))
    assert found.recommended is not None
    assert found.recommended is found.chosen
    assert found.recommended.cost.sharding == "weights" and found.recommended.memory.total <= 80 * GIB
    document = json.loads(json.dumps(tuning_document(found)))
    assert document["options"]["sharding"] == "auto"
    assert document["chosen"]["sharding"] == document["cost_model"]["sharding"] == "weights"
    (tmp_path / "tune.json").write_text(json.dumps(document))
    assert read_tuning(tmp_path / "tune.json") == tuned(found)
    plan = chunkplan.build(lengths, tmp_path / "plan", tuned(found).config, cost=tuned(found).cost)
    assert plan.cost.sharding == "weights" and not plan.config.equal_chunks


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_tune_and_build_predict_the_same_time_for_the_same_configuration(
    sharding: Sharding, lengths: Path, tmp_path: Path
) -> None:
    """With all steps in the sample, to the rounding of what a plan stores."""
    few = tmp_path / "few.npy"
    np.save(few, np.load(lengths)[:2000])
    given = {"chunk_sizes": (4096,), "ks": (2,), "global_batch": 64, "gpu_memory": 1000 * GIB}
    found = tune(few, options_with(**FOUR | given, sharding=sharding)).best
    plan = chunkplan.build(few, tmp_path / "plan", found.config, cost=found.cost)
    summary = chunkplan.plan_report(plan).summary
    assert summary.total_us / summary.num_steps == pytest.approx(found.step_ns / 1e3, rel=1e-5)
    assert summary.reduction_us is not None and summary.total_us == summary.predicted_us + summary.reduction_us
    cost = CostModel(sharding=sharding)
    layers = 28 * cost.shape.layer_parameters
    ends = 2 * cost.shape.embedding_parameters
    num_bytes = {
        "none": 8 * (layers + ends),
        "optimizer": 6 * (layers + ends),
        "gradients": 2 * layers + 6 * ends,
        "weights": 6 * ends,
    }[sharding]
    # A layer's first gather and last reduction, for which there is no work beside them.
    sent = {"gradients": [4], "weights": [2, 4]}.get(sharding, [])
    num_bytes += sum(sent) * cost.shape.layer_parameters
    hardware = found.cost.hardware
    expected = num_bytes * 3 / 4 / hardware.gpu_link_bytes * 1e6 + len(sent) * hardware.link_ns / 1e3
    assert summary.reduction_us / summary.num_steps == pytest.approx(expected)
