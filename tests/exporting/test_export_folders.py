"""What an export is made of and written into: other content is refused, and the command says what to do."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import chunkplan
from chunkplan.errors import DataError, UsageError
from chunkplan.exporting.export import FORMATS
from tests.support.analyses import LENGTHS, write_analysis


def test_an_export_is_replaced_and_what_datasets_caches_beside_it_too(workspace, tmp_path) -> None:
    target = tmp_path / "out"
    chunkplan.export(workspace / "plan", target, "hf", whole_only=True)
    datasets.load_from_disk(str(target)).map(lambda row: {"size": len(row["input_ids"])})
    assert list(target.glob("cache-*.arrow"))
    chunkplan.export(workspace / "plan", target, "jsonl", whole_only=True)
    assert sorted(path.name for path in target.iterdir()) == ["data-00000-of-00001.jsonl", "export.json"]


def test_what_others_wrote_is_never_replaced(workspace, tmp_path) -> None:
    """Not even a dataset with the file names of an export."""
    datasets.Dataset.from_dict({"input_ids": [[1]]}).save_to_disk(str(tmp_path / "theirs"))
    noted = tmp_path / "noted"
    chunkplan.export(workspace / "plan", noted, "hf", whole_only=True)
    (noted / "notes.txt").touch()
    for folder in (tmp_path / "theirs", noted):
        before = sorted(folder.iterdir())
        with pytest.raises(UsageError, match="is not just an export"):
            chunkplan.export(workspace / "plan", folder, "hf", whole_only=True)
        assert sorted(folder.iterdir()) == before


def test_what_cannot_be_exported_is_refused_by_name(workspace, tmp_path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    chunkplan.build(tmp_path / "lengths.npy", tmp_path / "bare", chunkplan.PlanConfig(chunk_size=64, k=1))
    plan, analysis = workspace / "plan", workspace / "analysis"
    for source, options, message in (
        (plan, {"to": "npz"}, "there is no format 'npz'"),
        (plan, {"whole_only": True, "allow_split": True}, "exclude each other"),
        (plan, {"chunk_size": 64}, "are for an analysis, this is a plan"),
        (plan, {"packing": "bfd"}, "are for an analysis, this is a plan"),
        (analysis, {}, "--chunk-size is missing"),
        (analysis, {"chunk_size": 64, "analysis": analysis}, "--analysis is for a plan"),
        (analysis, {"chunk_size": 64, "packing": "ffd"}, "ffd"),
        (analysis, {"chunk_size": 0}, "chunk size is 0"),
        (analysis, {"chunk_size": 10**10}, "from 1 to 2,147,483,647"),
        (tmp_path / "lengths.npy", {"chunk_size": 64}, "holds lengths only"),
        (tmp_path / "bare", {}, "holds lengths only"),
        (tmp_path / "nothing", {}, "no plan at"),
    ):
        with pytest.raises(UsageError, match=message):
            chunkplan.export(source, tmp_path / "out", **{"to": "jsonl", **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["plan", "analysis"])
def test_an_export_without_any_row_is_refused(handmade_plan, tmp_path, source) -> None:
    plan, analysis = handmade_plan([(np.arange(6), np.arange(6) > 0)], [{0: [[(0, 0, 3)], [(0, 3, 6)]]}])
    options = {} if source == "plan" else {"chunk_size": 3}
    with pytest.raises(UsageError, match="every sequence"):
        chunkplan.export(plan if source == "plan" else analysis, tmp_path / "out", "hf", whole_only=True, **options)


def test_a_plan_of_other_data_is_refused(workspace, tmp_path, random_sequences, handmade_plan) -> None:
    """Another analysis; tokens that the analysis has not; and tokens of another one."""
    other = write_analysis(tmp_path / "other", random_sequences(LENGTHS, seed=1))
    with pytest.raises(DataError, match="not the analysis of the plan"):
        chunkplan.export(workspace / "plan", tmp_path / "out", "hf", whole_only=True, analysis=other)
    plan, _ = handmade_plan([(np.arange(6), np.arange(6) > 0)], [{0: [[(0, 0, 9)]]}])
    with pytest.raises(DataError, match="tokens 0 to 9 of sequence 0 are not in the analysis"):
        chunkplan.export(plan, tmp_path / "out", "hf", allow_split=True)
    damaged = shutil.copytree(workspace / "analysis", tmp_path / "damaged")
    for part in (other / "tokens").iterdir():
        shutil.copy(part, damaged / "tokens" / part.name)
    with pytest.raises(DataError, match="targets: target masks from sequence 0 on are not those counted"):
        chunkplan.export(damaged, tmp_path / "out", "hf", chunk_size=64)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(workspace, tmp_path, command) -> Callable[..., Any]:
    """`chunkplan ARGUMENTS` beside a workspace."""
    shutil.copytree(workspace, tmp_path / "chunkplan-out")
    return command


def test_slices_that_ranks_share_are_parts_as_those_of_one_rank_are(tmp_path, random_sequences, command) -> None:
    lengths = (40_000, 3_000, 2_000, 1_000)
    write_analysis(tmp_path / "chunkplan-out" / "analysis", random_sequences(lengths))
    assert command("build", "--chunk-size", 4096, "--k", 2, "--dp", 2, "--cp", "auto").code == 0
    assert max(chunkplan.load_plan("chunkplan-out/plan").chunks()["cp_size"].to_pylist()) == 2
    ran = command("export", "--to", "jsonl")
    assert ran.code == 2
    assert "sequences are split into" in ran.err and "a plan built with `--cp off` may split fewer" in ran.err
    assert command("export", "--to", "jsonl", "--allow-split").code == 0
    rows = [json.loads(line) for path in Path("chunkplan-out/export-jsonl").glob("*.jsonl") for line in path.open()]
    assert sum(len(row["input_ids"]) for row in rows) == sum(lengths)
    assert command("export", "--to", "jsonl", "--whole-only", "--output", "whole").code == 0
    kept = [
        n for path in Path("whole").glob("*.jsonl") for line in path.open() for n in json.loads(line)["seq_lengths"]
    ]
    assert kept and set(kept) <= set(lengths[1:])


def test_the_command_prints_one_document(run) -> None:
    options = ("--to", "jsonl", "--chunk-size", 16, "--whole-only", "--json")
    document = json.loads(run("export", "chunkplan-out/analysis", *options).out)
    assert (document["path"], document["left_out"]["num_sequences"]) == ("chunkplan-out/export-jsonl", 4)
    assert document["source_kind"] == "analysis" and document["files"] == ["data-00000-of-00001.jsonl"]


def test_the_command_says_what_would_be_lost_and_how_to_go_on(run) -> None:
    for arguments, expected in (
        (("--to", "hf"), ("--whole-only leaves", "--allow-split makes")),
        (("--to", "hf", "--workspace", "elsewhere"), ("chunkplan build",)),
        ((), ("Missing option '--to'. Choose from: hf, megatron-bridge, jsonl, torch-pipelining, transformers, trl",)),
        (
            ("--to", "npz"),
            ("Invalid value for '--to': 'npz' is not one of 'hf', 'megatron-bridge', 'jsonl', 'torch-pipelining', ",),
        ),
    ):
        ran = run("export", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert all(words in ran.err for words in expected)


@pytest.mark.parametrize("source", ["chunkplan-out/plan", "chunkplan-out/analysis"])
def test_the_hint_has_a_command_that_splits_nothing(run, workspace, source) -> None:
    """Pasted, it packs all sequences whole."""
    options = () if source.endswith("plan") else ("--chunk-size", 16)
    [command] = re.findall("`(.*?)`", run("export", source, "--to", "jsonl", *options).err)
    assert command.startswith("chunkplan export chunkplan-out/analysis --chunk-size ")
    ran = run(*shlex.split(command)[1:], "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert (document["left_out"], document["cut"]) == (None, None)
    assert document["num_sequences"] == chunkplan.load_analysis(workspace / "analysis").num_sequences


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_in_place_of_a_manifest_its_folder_is_asked(workspace: Path, tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="is neither an analysis nor a file of lengths") as refused:
        chunkplan.export(workspace / kind / "manifest.json", tmp_path / "out", "jsonl", chunk_size=16)
    assert refused.value.hint == f"give its folder, {workspace / kind}"


def _sequences(analysis: chunkplan.Analysis) -> list[tuple[list[int], list[bool]]]:
    """Ids and targets of all sequences, in an order of their own."""
    tokens = analysis.tokens()
    found = [tokens(index) for index in range(len(analysis.num_tokens))]
    return sorted((np.asarray(ids).tolist(), np.asarray(target).tolist()) for ids, target in found)


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_read_back_with_the_same_sequences_and_targets(workspace, tmp_path, to) -> None:
    expected = _sequences(chunkplan.load_analysis(workspace / "analysis"))
    chunkplan.export(workspace / "analysis", tmp_path / "all", to, chunk_size=max(LENGTHS))
    for paths in (tmp_path / "all", str(tmp_path / "*"), str(tmp_path / "all" / "*"), str(tmp_path / "**" / "*.*")):
        found = chunkplan.analyze(paths, tmp_path / "cached" / "back")
        assert _sequences(found) == expected
        assert found.manifest["rejected"] == {}
        [source] = found.manifest["sources"]
        assert (source["unread_keys"], source["num_unread_keys"]) == ({}, 0)
        shutil.rmtree(tmp_path / "cached")
    made = chunkplan.export(workspace / "plan", tmp_path / "of a plan", to, allow_split=True)
    found = chunkplan.analyze(tmp_path / "of a plan", tmp_path / "out")
    assert (int(found.num_tokens.sum()), int(found.num_target_tokens.sum())) == (
        made.num_tokens,
        made.num_target_tokens,
    )


def test_the_order_of_a_plan_is_no_data_and_another_export_json_is(workspace, tmp_path) -> None:
    chunkplan.export_order(workspace / "plan", tmp_path / "data" / "order")
    (tmp_path / "data" / "export.json").write_text('[{"text": "one of somebody else"}]')
    for paths in (tmp_path / "data", str(tmp_path / "data" / "**" / "*.json*")):
        found = chunkplan.analyze(paths, tmp_path / "out")
        assert [Path(source["path"]).name for source in found.manifest["sources"]] == ["export.json"]
    with pytest.raises(UsageError, match="has no data in it or below"):
        chunkplan.analyze(tmp_path / "data" / "order", tmp_path / "out")
