"""`chunkplan build` as people type it: where options come from, what is written, and which plans there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import Run
from tests.support.places import ROOT

SAMPLE = ROOT / "sample_data"
BUILD_OPTIONS = ("--chunk-size", 64, "--k", 1, "--global-batch", 8)


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` in an empty folder."""
    return command


def test_a_config_file_gives_options_and_flags_win(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    (tmp_path / "plan.toml").write_text('chunk-size = 64\nk = 3\ndp = 2\nlast-batch = "keep"\n')
    built = json.loads(run("build", "lengths.npy", "--config", "plan.toml", "--k", 1, "--json").out)
    config = built["manifest"]["config"]
    assert (config["chunk_size"], config["k"], config["dp"], config["global_batch"]) == (64, 1, 2, 256)


def test_a_replaced_plan_is_named(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    run("build", "lengths.npy", "--chunk-size", 128, "--k", 1)
    again = run("build", "lengths.npy", "--chunk-size", 64, "--k", 2)
    assert "replaced a plan with ChunkSize 128, K 1, dp 1, pp 1" in again.err
    assert [path.name for path in (tmp_path / "chunkplan-out").iterdir()] == ["plan"], "no temporary folder stays"


@pytest.fixture
def sources(run: Run, tmp_path: Path) -> Path:
    """An analysis of two files of ten texts each in the workspace; returns the first file."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {number} " * (number + 5)}) for number in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert run("analyze", "a.jsonl", "b.jsonl", "--tokenizer", SAMPLE / "tokenizer").code == 0
    return tmp_path / "a.jsonl"


def test_what_is_held_out_gets_a_plan_and_the_trained_plan_says_so(run: Run, sources: Path) -> None:
    built = run("build", *BUILD_OPTIONS, "--holdout", 4)
    assert built.code == 0, built.err
    assert "held out" in built.out
    assert "4 of 20 sequences" in built.out
    assert "plan of the 4 sequences held out in chunkplan-out/plan-eval" in built.err
    assert run("validate").code == run("validate", "chunkplan-out/plan-eval").code == 0
    assert "4 of 20 sequences held out: these" in run("inspect", "chunkplan-out/plan-eval").out
    again = run("build", *BUILD_OPTIONS)
    assert "chunkplan-out/plan-eval is of an earlier build" in again.err


def test_a_mix_is_named_by_file_and_shown(run: Run, sources: Path) -> None:
    built = run("build", *BUILD_OPTIONS, "--mix", "a.jsonl=2", "--mix", "b.jsonl=0.3", "--json")
    assert built.code == 0, built.err
    document = json.loads(built.out)
    assert document["manifest"]["totals"]["num_sequences"] == 23
    assert list(document["manifest"]["config"]["mix"].values()) == [2, 0.3]
    assert "a.jsonl x 2" in run("inspect").out
    (sources.parent / "plan.toml").write_text("chunk-size = 64\nk = 1\nholdout = 0.5\nmix = { 'b.jsonl' = 3 }\n")
    from_file = json.loads(run("build", "--config", "plan.toml", "--json").out)["manifest"]
    assert from_file["config"]["holdout"] == 0.5
    assert list(from_file["config"]["mix"].values()) == [3]


def test_packing_only_names_the_sequence_that_is_too_long(run: Run, sources: Path) -> None:
    refused = run("build", "--chunk-size", 16, "--k", 1, "--no-split")
    assert refused.code == 3
    assert re.search(r"a\.jsonl:\d+", refused.err)
    assert "nothing may be split" in refused.err
    assert run("build", "--chunk-size", 512, "--k", 1, "--no-split").code == 0


def test_the_kinds_of_plans_are_built_and_valid(run: Run, sources: Path) -> None:
    for options in (
        ("--split", "even", "--equal-chunks", "--dp", 3),
        ("--split", "cost", "--no-fill-tails", "--packing", "mbs"),
        ("--balance", "search", "--dp", 2, "--workers", 1),
    ):
        assert run("build", *BUILD_OPTIONS, *options).code == 0
        assert run("validate").code == 0


def test_a_build_that_holds_out_replaces_no_plan_of_another_kind(run: Run, sources: Path) -> None:
    """...and says so before it plans; nor is such a plan taken for one of held-out sequences."""
    assert run("build", *BUILD_OPTIONS, "--output", "plan-eval").code == 0
    refused = run("build", *BUILD_OPTIONS, "--output", "plan", "--holdout", 0.2)
    assert refused.code == 2
    assert "plan-eval is not the plan of held-out sequences" in refused.err
    assert "earlier build" not in run("build", *BUILD_OPTIONS, "--output", "plan").err
    (sources.parent / "other-eval").mkdir()
    (sources.parent / "other-eval" / "notes.txt").write_text("mine")
    refused = run("build", *BUILD_OPTIONS, "--output", "other", "--holdout", 0.2)
    assert refused.code == 2
    assert not (sources.parent / "other").exists()


def test_an_empty_option_is_not_taken_for_none(run: Run, sources: Path) -> None:
    """As of a shell variable that is not set: nothing would be held out."""
    assert run("build", *BUILD_OPTIONS, "--holdout", "").code == 2
    (sources.parent / "plan.toml").write_text("mix = 'a.jsonl=2'\n")
    refused = run("build", *BUILD_OPTIONS, "--config", "plan.toml")
    assert refused.code == 2
    assert 'plan.toml: `mix` is "a.jsonl=2", expected weights by source' in refused.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--holdout", "some"), "--holdout is 'some', expected a share"),
        (("--holdout", "1.0"), "holdout is 1.0, expected a share between 0 and 1"),
        (("--holdout", "20"), "hold"),
        (("--mix", "a.jsonl"), "expected SOURCE=70% or SOURCE=X"),
        (("--mix", "c.jsonl=1"), "c.jsonl"),
        (("--mix", "a.jsonl=-1"), "the weight of a.jsonl is -1.0, expected a share such as 70%, or a number from 0"),
        (("--split", "even", "--no-split"), "exclude each other"),
        (("--packing", "ffd"), "packing is 'ffd', expected"),
        (("--workers", "0"), "--workers"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    run: Run, sources: Path, options: tuple[str, ...], message: str
) -> None:
    refused = run("build", *BUILD_OPTIONS, *options)
    assert refused.code == 2, refused.err
    assert message in refused.err
    assert "hint: " in refused.err
    assert not (sources.parent / "chunkplan-out" / "plan").exists()


def test_what_ranks_share_is_an_option_and_every_screen_has_its_time_and_memory(run: Run, tmp_path: Path) -> None:
    """The reduction is in no file, and no content hash covers what ranks share of optimizer states."""
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27] * 8))
    of_all = ("build", "lengths.npy", *BUILD_OPTIONS, "--dp", 2, "--equal-chunks", "--json")
    plain, none, weights = (
        json.loads(run(*of_all, "--output", name, "--sharding", name).out) for name in ("optimizer", "none", "weights")
    )
    assert plain["manifest"]["content_hash"] == none["manifest"]["content_hash"] != weights["manifest"]["content_hash"]
    assert plain["memory"]["memory"]["total"] < none["memory"]["memory"]["total"]
    assert none["summary"]["reduction_us"] > plain["summary"]["reduction_us"] > weights["summary"]["reduction_us"] > 0
    for name, built in (("optimizer", plain), ("none", none), ("weights", weights)):
        summary = json.loads(run("inspect", name, "--json").out)["summary"]
        assert summary == built["summary"] | summary
        assert summary["total_us"] == summary["predicted_us"] + summary["reduction_us"]
        simulated = json.loads(run("simulate", name, "--json").out)
        step = json.loads(run("inspect", name, "--step", 0, "--json").out)
        each = pytest.approx(summary["reduction_us"] / summary["num_steps"])
        assert simulated["reduction"] == step["reduction_us"] == each
    numbers = {row["name"]: row for row in json.loads(run("diff", "none", "weights", "--json").out)["numbers"]}
    assert numbers["total_us"]["before"] == none["summary"]["total_us"]
    with_reduction = none["summary"]["lower_bound_us"] + none["summary"]["reduction_us"]
    assert numbers["total_lower_bound_us"]["before"] == none["summary"]["total_lower_bound_us"] == with_reduction
    assert numbers["reduction_us"]["after"] == weights["summary"]["reduction_us"]
    shown = run("inspect", "weights", width=200).out
    assert "weights, gradients and optimizer states sharded over 2 ranks (ZeRO-3)" in shown
    assert re.search(r"predicted +[\d.]+ m?s a step, .*; [\d.]+% of it to sum gradients", shown)


def test_one_rank_alone_shares_nothing_and_says_so(run: Run, tmp_path: Path) -> None:
    """What the planner does not gather and the trainer does not cut; "optimizer" and "none" are the same there."""
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27] * 8))
    of_one = ("build", "lengths.npy", *BUILD_OPTIONS, "--pp", 2, "--dry-run", "--sharding")
    for name in ("gradients", "weights"):
        ran = run(*of_one, name)
        assert (ran.code, ran.out) == (2, "")
        assert f"--sharding {name} with one data-parallel rank, which shares nothing with others" in ran.err
        assert "hint: leave it out, or give more data-parallel ranks, for example --dp 2" in ran.err
        assert run(*of_one, name, "--dp", 2).code == 0
    assert all(run(*of_one, name).code == 0 for name in ("none", "optimizer"))


def test_whatever_is_sharded_the_trainer_can_run(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27] * 8))
    shared = ("build", "lengths.npy", *BUILD_OPTIONS, "--dp", 2, "--cp", "off", "--sharding")
    for arguments in (("gradients",), ("weights",), ("weights", "--equal-chunks"), ("optimizer",)):
        assert "plan only" not in run(*shared, *arguments, width=200).err


def test_layers_of_several_stages_are_not_to_be_compiled(run: Run, tmp_path: Path) -> None:
    """The trainer would leave them as they are, and a plan that counts on it would be too fast."""
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    refused = run("build", "lengths.npy", *BUILD_OPTIONS, "--pp", 2, "--compile")
    assert refused.code == 2 and "--compile with 2 pipeline stages" in refused.err
    assert not (tmp_path / "chunkplan-out").exists()
    assert run("build", "lengths.npy", *BUILD_OPTIONS, "--pp", 1, "--compile").code == 0
