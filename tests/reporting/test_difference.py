"""`chunkplan diff` and its twin: what two plans, or two analyses, have in common and what not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chunkplan
from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from tests.support.places import ROOT

LENGTHS = np.random.default_rng(0).integers(1, 900, 90)


def build(folder: Path, lengths: Path, **changes: object) -> Plan:
    config = {"chunk_size": 512, "k": 1, "global_batch": 10, "cp": "off", **changes}
    return chunkplan.build(chunkplan.load_analysis(lengths), folder, chunkplan.PlanConfig(**config))  # type: ignore[arg-type]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return tmp_path / "lengths.npy"


@pytest.fixture
def plan(tmp_path: Path, lengths: Path) -> Path:
    return build(tmp_path / "plan", lengths).path


def analyze(folder: Path, name: str, files: dict[str, list[str]]) -> Path:
    data = folder / f"{name}-data"
    data.mkdir()
    for file, texts in files.items():
        (data / file).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = chunkplan.IntakeOptions(on_error="skip")
    return chunkplan.analyze([data / file for file in files], folder / name, options).path


def test_a_plan_is_identical_to_its_copy(tmp_path: Path, plan: Path) -> None:
    copy = shutil.copytree(plan, tmp_path / "copy")
    found = chunkplan.diff(plan, copy)
    assert (found.kind, found.verdict, found.entries, found.sources) == ("plan", "identical", (), ())
    assert found.same_steps is not None
    assert found.same_steps.num_same == found.same_steps.num_steps == 9
    assert all(number.after == pytest.approx(number.before) for number in found.numbers)


def test_a_plan_in_which_ranks_share_sequences_differs_from_one_without_by_what_they_share(
    tmp_path: Path, lengths: Path
) -> None:
    np.save(lengths, [*LENGTHS, *[9000] * 3])
    plans = [build(tmp_path / str(cp), lengths, dp=4, cp=cp).path for cp in ("off", "auto")]
    found = chunkplan.diff(*plans)
    assert [(entry.name, entry.before, entry.after) for entry in found.entries] == [("cp", "off", "auto")]
    [shared] = [number for number in found.numbers if number.name == "num_shared_sequences"]
    assert shared.before == 0 and shared.after is not None and shared.after >= 3


def test_the_memory_of_the_fullest_gpu_is_a_row_with_its_change(
    tmp_path: Path, plan: Path, lengths: Path, command: Callable[..., Any]
) -> None:
    """In GiB, as `inspect` has it; plans that do not describe their model say nothing of it."""
    larger = build(tmp_path / "larger", lengths, k=2, chunk_size=1024).path
    before, after = (chunkplan.plan_report(each).memory for each in (plan, larger))
    assert before is not None and after is not None
    [memory] = [number for number in chunkplan.diff(plan, larger).numbers if number.name == "memory_bytes"]
    assert (memory.unit, memory.before, memory.after) == ("bytes", before.memory.total, after.memory.total)
    [row] = re.findall("^memory of the fullest GPU.*$", command("diff", plan, larger).out, re.M)
    change = 100 * (after.memory.total / before.memory.total - 1)
    sizes = [f"{each.memory.total / 2**30:,.1f} GiB" for each in (before, after)]
    assert row.split("GPU")[1].split() == [*" ".join(sizes).split(), f"{change:+,.1f}%"]


def test_what_no_content_hash_covers_makes_another_manifest_only(tmp_path: Path, plan: Path) -> None:
    copy = shutil.copytree(plan, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "tool_version": "9.9"}))
    found = chunkplan.diff(plan, copy)
    assert found.verdict == "equal content, other manifest"
    [entry] = found.entries
    assert (entry.section, entry.name, entry.after) == ("written by", "tool_version", "9.9")


def test_the_same_analysis_seen_from_elsewhere_is_no_difference(tmp_path: Path, plan: Path, lengths: Path) -> None:
    """A plan says where its analysis lies as seen from its own folder."""
    deeper = build(tmp_path / "deep" / "plan", lengths)
    assert deeper.manifest["analysis"]["path"] != chunkplan.load_plan(plan).manifest["analysis"]["path"]
    found = chunkplan.diff(plan, deeper.path)
    assert (found.verdict, found.entries) == ("identical", ())
    other = build(tmp_path / "deep" / "other", lengths, k=2)
    [entry] = chunkplan.diff(plan, other.path).entries
    assert (entry.section, entry.name) == ("configuration", "k")


def test_entries_of_the_configuration_that_differ_are_those_that_were_changed(
    tmp_path: Path, plan: Path, lengths: Path
) -> None:
    other = build(tmp_path / "other", lengths, chunk_size=256, dp=2)
    found = chunkplan.diff(plan, other.path)
    assert found.verdict == "different"
    assert [(entry.section, entry.name, entry.before, entry.after) for entry in found.entries] == [
        ("configuration", "chunk_size", 512, 256),
        ("configuration", "dp", 1, 2),
    ]
    numbers = {number.name: number for number in found.numbers}
    totals = [plan.manifest["totals"]["num_chunks"] for plan in map(chunkplan.load_plan, (plan, other.path))]
    assert [numbers["num_chunks"].before, numbers["num_chunks"].after] == totals
    assert found.same_steps is not None and found.same_steps.num_same == 9


def test_another_model_differs_in_the_cost_model_by_dotted_names(tmp_path: Path, plan: Path, lengths: Path) -> None:
    analysis = chunkplan.load_analysis(lengths)
    config = chunkplan.PlanConfig(chunk_size=512, k=1, global_batch=10)
    cost = chunkplan.CostModel(hardware=chunkplan.load_hardware("a100"))
    other = chunkplan.build(analysis, tmp_path / "other", config, cost=cost)
    found = chunkplan.diff(plan, other.path)
    assert {entry.section for entry in found.entries} == {"cost model"}
    names = {entry.name: (entry.before, entry.after) for entry in found.entries}
    assert names["hardware.name"] == ("h100", "a100")
    assert all(name.startswith("hardware.") for name in names)


def test_another_seed_puts_other_sequences_into_the_steps(tmp_path: Path, plan: Path, lengths: Path) -> None:
    found = chunkplan.diff(plan, build(tmp_path / "other", lengths, seed=1, epochs=2).path)
    assert found.same_steps is not None
    assert (found.same_steps.num_same, found.same_steps.num_steps) == (0, 18)


def test_a_sequence_that_comes_twice_is_not_the_same_as_once(tmp_path: Path) -> None:
    data = analyze(tmp_path, "analysis", {"a.jsonl": ["some words " * 9], "b.jsonl": ["other words " * 9]})
    source = chunkplan.load_analysis(data).manifest["sources"][0]["path"]
    once, twice = (build(tmp_path / name, data, mix={source: weight}) for name, weight in (("once", 1), ("twice", 2)))
    found = chunkplan.diff(once.path, twice.path)
    assert found.same_steps is not None and found.same_steps.num_same == 0
    assert ("configuration", f"mix.{source}", 1, 2) in [
        (entry.section, entry.name, entry.before, entry.after) for entry in found.entries
    ]


def test_steps_of_plans_of_other_data_are_not_compared(tmp_path: Path, plan: Path) -> None:
    np.save(tmp_path / "others.npy", LENGTHS + 1)
    found = chunkplan.diff(plan, build(tmp_path / "other", tmp_path / "others.npy").path)
    assert found.same_steps is None
    assert {"content_hash", "path"} <= {entry.name for entry in found.entries if entry.section == "data"}


def test_sources_are_added_removed_changed_or_moved(tmp_path: Path) -> None:
    same, moved, gone, new = (["one text"], ["a text that moves"], ["a text that goes"], ["a text that comes"])
    files = {"same.jsonl": same, "grown.jsonl": ["short"], "old.jsonl": moved, "gone.jsonl": gone}
    before = analyze(tmp_path, "before", files)
    (tmp_path / "before-data" / "grown.jsonl").write_text('{"text": "short"}\n{"text": "longer"}\n{"text": ""}\n')
    (tmp_path / "before-data" / "old.jsonl").rename(tmp_path / "before-data" / "new.jsonl")
    (tmp_path / "before-data" / "added.jsonl").write_text(json.dumps({"text": new[0]}) + "\n")
    names = ("same.jsonl", "grown.jsonl", "new.jsonl", "added.jsonl")
    paths = [tmp_path / "before-data" / name for name in names]
    options = chunkplan.IntakeOptions(on_error="skip")
    found = chunkplan.diff(before, chunkplan.analyze(paths, tmp_path / "after", options).path)
    changes = {
        change.change: tuple(Path(side["path"]).name if side else None for side in (change.before, change.after))
        for change in found.sources
    }
    assert changes == {
        "changed": ("grown.jsonl", "grown.jsonl"),
        "moved": ("old.jsonl", "new.jsonl"),
        "removed": ("gone.jsonl", None),
        "added": (None, "added.jsonl"),
    }
    [rejected] = found.rejected
    assert (rejected.name, rejected.before, rejected.after) == ("empty", 0, 1)
    numbers = {number.name: (number.before, number.after) for number in found.numbers}
    assert numbers["num_sequences"] == (4, 5)


def test_another_tokenizer_and_other_options_are_entries(tmp_path: Path) -> None:
    before = analyze(tmp_path, "before", {"a.jsonl": ["some words to cut"]})
    tokenizer = ROOT / "sample_data" / "tokenizer"
    after = chunkplan.analyze(
        [tmp_path / "before-data" / "a.jsonl"],
        tmp_path / "after",
        chunkplan.IntakeOptions(max_length=2),
        tokenizer=tokenizer,
    )
    entries = {
        entry.name: (entry.section, entry.before, entry.after) for entry in chunkplan.diff(before, after.path).entries
    }
    assert entries["exact"] == ("data", False, True)
    assert entries["tokenizer.path"] == ("tokens", None, str(tokenizer))
    assert entries["max_length"] == ("options", None, 2)


def test_files_of_the_same_lengths_are_the_same_analysis(tmp_path: Path, lengths: Path) -> None:
    pq.write_table(pa.table({"tokens": LENGTHS}), tmp_path / "lengths.parquet")
    assert chunkplan.diff(lengths, tmp_path / "lengths.parquet").verdict == "identical"


def test_a_plan_and_an_analysis_cannot_be_compared(plan: Path, lengths: Path, command: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"lengths\.npy an analysis"):
        chunkplan.diff(lengths, plan)
    ran = command("diff", plan, lengths)
    assert (ran.code, ran.out) == (2, "")
    assert "hint: compare two plans" in ran.err


def test_the_command_prints_the_twins_document(
    tmp_path: Path, plan: Path, lengths: Path, command: Callable[..., Any]
) -> None:
    """And exits with 0 whether the two differ or not."""
    other = build(tmp_path / "other", lengths, k=2).path
    ran = command("diff", plan, other, "--json")
    assert ran.code == 0
    document, expected = json.loads(ran.out), chunkplan.diff(plan, other).to_dict()
    assert [entry["name"] for entry in document["entries"]] == ["k"]
    assert document.keys() == expected.keys()
    assert command("diff", plan, plan).code == 0


def test_names_are_shown_as_they_are_and_do_nothing_to_the_terminal(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    analyze(tmp_path, "before", {"[red]a[bold].jsonl": ["a text"]})
    analyze(tmp_path, "after", {"[link=x]b\x1b[2J.jsonl": ["another text"]})
    out = command("diff", "before", "after").out
    together = "".join(line.split("  ")[0] for line in out.splitlines())
    assert "[red]a[bold].jsonl" in together and "[link=x]b␛[2J.jsonl" in together
    assert "\x1b" not in out
