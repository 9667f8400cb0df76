"""What cannot be planned is refused, by name and with a hint, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import PlanConfig, build
from chunkplan.errors import DataError, UsageError
from tests.support.planned_steps import first_step, save, write_analysis


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"schedule": "fastest"},
            re.escape(
                "expected algorithm2 (on one stage) or auto or 1f1b or interleaved or zero-bubble or zero-bubble-v "
                "or search"
            ),
        ),
        ({"schedule": "1f1b"}, "for two stages or more, pp is 1"),
        ({"schedule": "algorithm2", "pp": 2}, "for one stage, pp is 2"),
        ({"virtual_stages": 2, "pp": 2}, "auto has one virtual stage"),
        ({"virtual_stages": 1, "pp": 2, "schedule": "zero-bubble-v"}, "zero-bubble-v has two virtual stages"),
        ({"virtual_stages": 4, "pp": 2, "schedule": "zero-bubble-v"}, "has two virtual stages, virtual-stages is 4"),
        ({"schedule": "interleaved", "pp": 2, "virtual_stages": 0}, "virtual-stages is 0"),
        ({"schedule": "interleaved", "pp": 2, "virtual_stages": 1}, "two virtual stages or more, virtual-stages is 1"),
        ({"stage_layers": (9, -1), "pp": 2}, "stage-layers is 9,-1, expected a whole number from 1"),
        ({"memory_tokens": 0}, "max-activation-tokens is 0"),
        ({"k_by_length": ((5, 1), (5, 2))}, "tokens ascending"),
        ({"k_by_length": (5, 1)}, "pairs of tokens and K"),
    ],
)
def test_schedules_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PlanConfig(chunk_size=8, k=1, **changes)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"dp": 8, "cp": 3}, "cp is 3, expected a divisor of dp, which is 8", "choose 2, 4 or auto"),
        ({"dp": 8, "cp": 16}, "cp is 16, expected a divisor of dp, which is 8", "choose 8 or auto"),
        ({"dp": 7, "cp": 2}, "cp is 2, expected a divisor of dp, which is 7", "choose 7 or auto"),
        ({"cp": 2}, "cp is 2, expected a divisor of dp, which is 1", "set dp to a multiple of 2, or leave cp out"),
        (
            {"dp": 8, "cp": "auto", "pp": 2, "schedule": "search"},
            "schedule search orders every rank by itself: groups of ranks would deadlock",
            "use schedule auto with cp, or leave cp out",
        ),
        (
            {"dp": 8, "cp": 4, "balance": "search"},
            "balance search assigns whole sequences to ranks, and cp has ranks share sequences",
            "leave balance out, or leave cp out",
        ),
        (
            {"dp": 8, "cp": "auto", "split": "none"},
            "nothing may be split, and cp splits sequences among ranks",
            "leave no-split out, or leave cp out",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused_with_what_can(changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        PlanConfig(chunk_size=8, k=1, **changes)
    assert (refused.value.message, refused.value.hint) == (message, hint)


@pytest.mark.parametrize("schedule", ["interleaved", "search", "zero-bubble-v"])
def test_schedules_in_which_groups_could_wait_for_ever_are_refused(schedule: str) -> None:
    with pytest.raises(UsageError, match=f"schedule {schedule} orders every rank by itself"):
        PlanConfig(chunk_size=8, k=1, dp=2, pp=2, cp="auto", schedule=schedule)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="28 layers, too few for 15 stages of 2 virtual stages"):
        build(save(tmp_path, [5]), tmp_path / "plan", PlanConfig(chunk_size=8, k=1, pp=15, schedule="interleaved"))


@pytest.mark.parametrize("layers", [(15, 14), (14, 13), (20, 9)])
def test_layers_of_stages_that_are_not_the_models_are_refused(tmp_path: Path, layers: tuple[int, int]) -> None:
    """Also where they are as even as those of a model of so many layers would come."""
    with pytest.raises(UsageError, match=f"stage-layers has {sum(layers)} layers, Qwen2.5-7B has 28") as refused:
        build(save(tmp_path, [5]), tmp_path / "plan", PlanConfig(chunk_size=8, k=1, pp=2, stage_layers=layers))
    assert "give 2 numbers that sum to 28, or leave it out" in refused.value.hint


def test_layers_as_even_as_they_come_make_the_plan_that_is_made_without_them(tmp_path: Path) -> None:
    lengths = save(tmp_path, [5, 20, 3])
    one, other, uneven = (
        build(lengths, tmp_path / "plan", PlanConfig(chunk_size=8, k=1, pp=2, stage_layers=layers)).manifest
        for layers in (None, (14, 14), (13, 15))
    )
    assert other["content_hash"] == one["content_hash"] != uneven["content_hash"]
    assert other["config"] == one["config"] and "stage_layers" not in one["config"]


def test_nothing_is_split_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, and nothing may be split") as refused:
        build(save(tmp_path, [8, 9, 10]), tmp_path / "plan", PlanConfig(chunk_size=8, k=1, split="none"))
    assert str(refused.value.where).endswith("lengths.npy, row 1")
    assert not (tmp_path / "plan").exists()
    source = write_analysis(tmp_path / "analysis", [8, 9])
    with pytest.raises(DataError) as refused:
        build(source, tmp_path / "plan", PlanConfig(chunk_size=8, k=1, split="none"))
    assert refused.value.where == "d.jsonl:2"
    step = first_step(tmp_path, [8, 8, 3, 4], split="none")
    assert [chunk.num_tokens for chunk in step.chunks[0]] == [8, 8, 7]


def test_more_chunks_than_a_plan_can_hold_are_refused_before_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="segments"):
        build(save(tmp_path, [2**31 - 1] * 2), tmp_path / "plan", PlanConfig(chunk_size=1, k=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk-size is 0"),
        ({"k": 0}, "k is 0"),
        ({"dp": 0}, "dp is 0"),
        ({"pp": -1}, "pp is -1"),
        ({"global_batch": 2.5}, "global-batch is 2.5"),
        ({"epochs": True}, "epochs is True"),
        ({"last_batch": "pad"}, "last-batch is 'pad'"),
        ({"split": "half"}, "split is 'half', expected full or even or cost or none"),
        ({"packing": "ffd"}, "packing is 'ffd'"),
        ({"balance": "best"}, "balance is 'best'"),
        ({"equal_chunks": 1}, "equal-chunks is 1"),
        ({"holdout": 0}, "holdout is 0"),
        ({"holdout": 1.5}, "holdout is 1.5"),
        ({"mix": {"a": -1}}, "the weight of a is -1"),
    ],
)
def test_a_config_checks_itself(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanConfig(**{"chunk_size": 8, "k": 1, **change})  # type: ignore[arg-type]


def test_evaluating_on_nothing_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [5, 6])
    with pytest.raises(UsageError, match="nothing is held out"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, part="eval"))
    assert not (tmp_path / "plan").exists()


def test_dropping_every_sequence_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [5, 6])
    with pytest.raises(UsageError, match="all 2 sequences would be dropped"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, last_batch="drop"))
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("bad", [[0, 5], [-3], [2**31], []])
def test_impossible_lengths_are_refused_by_row(tmp_path: Path, bad: list[int]) -> None:
    np.save(tmp_path / "lengths.npy", np.array(bad, np.int64))
    with pytest.raises(DataError, match="no lengths in it" if not bad else "row 0"):
        build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1))
