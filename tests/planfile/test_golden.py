"""What earlier releases wrote is read or refused by name, and content hashes stay what they are.

`tests/golden/` holds a small dataset and what each schema version made of it, written by the release of that version;
of versions that are refused it holds the manifests alone. A hash here that no longer holds means that plans which were
built before differ from those built now. That may be right, but never by accident.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, analyze, build, build_like, load_analysis, load_plan, validate
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.load import load_held_out
from chunkplan.planfile.schema import CHUNKS, CP_COLUMNS
from tests.support.places import GOLDEN
from tests.support.plain import plain_cost

ANALYSIS_HASH = "04c12a864976e44633fc8ae2fe7e73ea105d9724fb8a856d26f0480a859c784c"

SMALL: dict[str, Any] = {"chunk_size": 64, "k": 1, "global_batch": 16, "keep_attention": "off"}

#: Content hashes of the plans that releases wrote, by schema version: with the times that these predicted.
WRITTEN = {6: "eab6551fb6d6b0cce9f4b66f460888862a61e1cec4e19d8cec4da8b4c5ed2f1c"}

#: What a plan of the golden analysis has beside `SMALL`, and its content hash, which covers costs and times (float32).
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, "6050ff6d9ca2a3a593ab889eb5fd88ecdc548609ea019c07b4d974a49d254d0b"),
    "1F1B": (
        {"dp": 2, "pp": 2, "schedule": "1f1b", "cp": "off", "seed": 3},
        "eab6551fb6d6b0cce9f4b66f460888862a61e1cec4e19d8cec4da8b4c5ed2f1c",
    ),
    "interleaved": (
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        "7ffb3a0914a46840a95a4d2caa220151ad9e37a7f81bc4002c533c1b6288158c",
    ),
    "zero-bubble": (
        {"pp": 3, "schedule": "zero-bubble"},
        "9e47860422a6ef98a76bed9634a56302a59461b5eaf17ccfe09c94393d2f5bdc",
    ),
    "zero-bubble-v": (
        {"pp": 3, "schedule": "zero-bubble-v"},
        "17f047fcf30fc7704074ed8f619d037f2db838b4e02dfccdb1d099f12a2e02b6",
    ),
    "search": ({"pp": 2, "schedule": "search"}, "18e861219ceb2d691f2ec980a9df8c492e84922f520290c0e29e4afcb72311e1"),
    "memory": (
        {"pp": 2, "schedule": "1f1b", "memory_tokens": 256},
        "31c8348ed14a3b12ca8a0dea6664e9597e0c1b02529dea463b89b33ba07e47c5",
    ),
    "auto": (
        {"dp": 2, "pp": 4, "seed": 3, "cp": "off"},
        "5adc86148c0fcb52a765161bb71e8a1791b09ad46a484cdbbdcc644f07bd2b6b",
    ),
    "auto within memory": (
        {"pp": 2, "memory_tokens": 128},
        "4d01c0a5f87d0b40f0f2598c0aa3a92dbf27358fead4b9ea0a03ea3d67b96f7b",
    ),
    "K by length": (
        {"k_by_length": ((128, 2), (512, 4))},
        "2c1d86946fb757df43a3980a105f47086f1b10fa41028a310f4277b22665e636",
    ),
    "equal chunks": (
        {"dp": 3, "equal_chunks": True, "cp": "off"},
        "c2f09966f12a91719e11d09d658e531c72d745dfa97e2e455e9811211772c9e5",
    ),
    "even parts": (
        {"split": "even", "tail_sharing": False},
        "d242d90176e4055aeb958ae1c0ebabc48de685004fdbf1c8c658a94363a3447f",
    ),
    "searched balance": (
        {"dp": 2, "balance": "search"},
        "473c108ead917c69188a941c68ff75ba9b67edf255d60e3fd11360eeeae8b0a5",
    ),
    "two epochs": (
        {"epochs": 2, "last_batch": "drop"},
        "60060a0c1f79ceeb114cb73da11682858d28b58a60ba148fdb16c6b4957bee17",
    ),
    "shared sequences": (
        {"dp": 4, "cp": "auto"},
        "d1a6c197576d98ae05f89b835bef26a298cef7758409f32193e4d1b28682e020",
    ),
    "shared sequences on a pipeline": (
        {"dp": 4, "pp": 2, "schedule": "1f1b", "cp": "auto", "seed": 3},
        "b11164fc4f9b756e5687850ea52d0a9438f378bd597f4b09447bfdd15dc40326",
    ),
    "shared sequences, scheduled together": (
        {"dp": 4, "pp": 2, "seed": 3},
        "cb78ec0c9aa92c811bb1fb325deebbd14be741729b359219b2ba91455ed6dfa3",
    ),
    "hold-out": ({"holdout": 0.2}, "fdc1beb0211dc4300960163592d92d8c6074665ccf81c2b2ce06e4db8a168031"),
    "mix": (
        {"mix": {"more.jsonl": 1.5}, "epochs": 2},
        "da7c3ffe4bd3a995ac8f379df4343bef8ee7da8853ad14b661b48dcb416d99ad",
    ),
    "kept attention": (
        {"dp": 2, "pp": 2, "keep_attention": "auto"},
        "0f4d3809665c5edea8bdd9d0391bf79ef321ffe053ccf0541278751d783ab784",
    ),
}


def test_the_analysis_of_a_dataset_is_the_same_in_every_release(tmp_path: Path) -> None:
    files = [GOLDEN / "data.jsonl", GOLDEN / "more.jsonl"]
    analysis = analyze(files, tmp_path / "analysis", IntakeOptions(on_error="skip"), cache=tmp_path / "cache")
    assert analysis.content_hash == ANALYSIS_HASH


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_configuration_is_the_same_in_every_release(name: str, tmp_path: Path) -> None:
    config, expected = PLANS[name]
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", PlanConfig(**{**SMALL, **config}), cost=plain_cost())
    assert plan.content_hash == expected


def test_a_plan_for_adapters_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Its costs and times are those of adapters. Others say nothing of these."""
    config = PlanConfig(**SMALL, pp=3, schedule="zero-bubble")
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", config, cost=plain_cost(lora_rank=16, load_in_4bit=True))
    assert plan.content_hash == "cac2ef83fe547eb191de430630c4470cb8e0bab0b55625a055850af3f3a5569a"
    assert load_plan(plan.path).cost == plain_cost(lora_rank=16, load_in_4bit=True)
    assert validate(plan.path).ok
    whole = build(GOLDEN / "analysis-5", tmp_path / "whole", config, cost=plain_cost())
    assert whole.content_hash == PLANS["zero-bubble"][1]
    assert not {"lora_rank", "load_in_4bit", "optimizer"} & whole.manifest["predictions"]["cost_model"].keys()


def test_what_is_held_out_is_the_same_in_every_release(tmp_path: Path) -> None:
    config, _ = PLANS["hold-out"]
    settings = PlanConfig(**{**SMALL, **config})
    held_out = load_held_out(build(GOLDEN / "analysis-5", tmp_path / "plan", settings, cost=plain_cost()))
    assert held_out is not None
    assert held_out.content_hash == "21022df0a4f9d3fa562a9abf13634612f14aa84ee96d1eccb9caf167606e365c"


@pytest.mark.parametrize("version", WRITTEN)
def test_a_plan_of_this_version_is_read_and_valid(version: int) -> None:
    plan = load_plan(GOLDEN / f"plan-{version}")
    assert plan.manifest["schema_version"] == version
    assert validate(plan.path).ok
    assert [step.step for step in plan.iter_steps()] == [0, 1, 2, 3]
    assert plan.content_hash == WRITTEN[version]


def test_a_plan_in_which_ranks_share_sequences_is_read_and_valid() -> None:
    plan = load_plan(GOLDEN / "plan-6-shared")
    assert plan.config.cp == "auto"
    assert validate(plan.path).ok
    assert plan.content_hash == "b11164fc4f9b756e5687850ea52d0a9438f378bd597f4b09447bfdd15dc40326"
    shared = [chunk for step in plan.iter_steps() for chunk in step.chunks[3] if chunk.cp_size > 1]
    assert {(chunk.cp_first_rank, chunk.cp_size, chunk.cp_heads) for chunk in shared} == {(0, 4, 1), (2, 2, 1)}
    assert all(chunk.cp_tokens > chunk.num_tokens > 0 and chunk.kind == "dependent" for chunk in shared)


def test_a_plan_without_shared_sequences_says_nothing_of_them(tmp_path: Path) -> None:
    """Neither in its configuration, which is hashed, nor in its columns: it is the one that was built before."""
    config, expected = PLANS["1F1B"]
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", PlanConfig(**{**SMALL, **config}), cost=plain_cost())
    assert plan.content_hash == expected
    assert "cp" not in plan.manifest["config"]
    assert pq.read_schema(plan.path / "chunks.parquet").names == CHUNKS.names
    assert not {*CHUNKS.names} & {*CP_COLUMNS}
    assert load_plan(plan.path).config.cp == "off"


def test_a_plan_of_lengths_alone_is_the_same_in_every_release(tmp_path: Path) -> None:
    config = PlanConfig(**{**SMALL, **PLANS["1F1B"][0]})
    plan = build(GOLDEN / "lengths.npy", tmp_path / "plan", config, cost=plain_cost())
    assert plan.content_hash == "996a3557bac84c42a0e6d6b7f580344a2059f40313772f722c7e26a6c545255e"


@pytest.mark.parametrize("version", [4, 5, 6])
def test_an_analysis_of_this_version_is_read_and_valid(version: int) -> None:
    analysis = load_analysis(GOLDEN / f"analysis-{version}")
    assert analysis.manifest["schema_version"] == version
    assert analysis.content_hash == ANALYSIS_HASH
    assert validate(analysis.path).ok


@pytest.mark.parametrize(("kind", "version"), [*(("plan", version) for version in range(1, 6)), ("analysis", 3)])
def test_an_older_version_is_refused_by_name(kind: str, version: int, tmp_path: Path) -> None:
    load, folder = load_plan if kind == "plan" else load_analysis, GOLDEN / f"{kind}-{version}"
    with pytest.raises(DataError, match=f"written by schema version {version} .* reads .* from version") as refused:
        load(folder)
    assert refused.value.exit_code == 3
    if kind == "plan" and version >= 3:  # of which the manifest says all that a build needs
        [command] = re.findall("`(.*?)`", refused.value.hint)
        *words, like, option, output = shlex.split(command)
        assert (words, Path(like), option) == (["chunkplan", "build", "--like"], folder, "--output")
        assert not Path(output).exists() and Path(output).parent == GOLDEN
    else:
        anew = "analyze its data again with `chunkplan analyze`"
        config = ", and give `chunkplan build` what is under `config` in this file" if kind == "plan" else ""
        assert refused.value.hint == anew + config
    if kind == "plan" and version < 3:
        with pytest.raises(DataError, match="reads plans from version 3 on") as refused:
            build_like(folder, tmp_path / "new")
        assert refused.value.hint == anew + config and '"config": {' in Path(refused.value.where).read_text()


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_newer_version_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Whatever else it holds: its manifest need not have what ours has."""
    (tmp_path / MANIFEST).write_text(f'{{"kind": "{kind}", "schema_version": 999, "tool_version": "9.1"}}')
    load = load_plan if kind == "plan" else load_analysis
    with pytest.raises(DataError, match=r"written by schema version 999 \(chunkplan 9.1\)") as refused:
        load(tmp_path)
    assert "upgrade chunkplan" in refused.value.hint
