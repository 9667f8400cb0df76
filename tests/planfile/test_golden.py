"""What earlier releases wrote is read or refused by name, and content hashes stay what they are.

`tests/golden/` holds a small dataset and what each schema version made of it, written by the release of that version;
of versions that are refused it holds the manifests alone. A hash here that no longer holds means that plans which were
built before differ from those built now. That may be right, but never by accident.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from chunkplan import CostModel, PlanConfig, analyze, build, load_analysis, load_plan, validate
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.load import load_held_out
from chunkplan.planfile.schema import CHUNKS, CP_COLUMNS
from tests.support.places import GOLDEN

ANALYSIS_HASH = "04c12a864976e44633fc8ae2fe7e73ea105d9724fb8a856d26f0480a859c784c"

SMALL: dict[str, Any] = {"chunk_size": 64, "k": 1, "global_batch": 16}

#: The plan of lengths.npy that version 3 wrote before there was a version 4.
PLAN_3: dict[str, Any] = {**SMALL, "dp": 2, "pp": 2, "schedule": "1f1b", "cp": "off", "seed": 3}
PLAN_3_HASH = "6718d933b9a563d952258c061e3149b274ef575dd4b704019d51b0461c2402ae"

#: What a plan of the golden analysis has beside `SMALL`, and its content hash, which covers costs and times (float32).
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, "b7b80d3e69b781a41b58fc5eb96a04faae189224fb9edf0f717342f67f5730d2"),
    "1F1B": (
        {"dp": 2, "pp": 2, "schedule": "1f1b", "cp": "off", "seed": 3},
        "5df0533014a0534bd4548d986793ea654bc09e7c6cf85b75911e14df452f2e62",
    ),
    "interleaved": (
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        "fc7047470edda62a6be2e94d14eb50df02363904dce422ad9307d546d569ae97",
    ),
    "zero-bubble": (
        {"pp": 3, "schedule": "zero-bubble"},
        "dd5bf58c8cf7f97e17e02eda01c1809e85858e00c816384663bb27456d8b01ff",
    ),
    "zero-bubble-v": (
        {"pp": 3, "schedule": "zero-bubble-v"},
        "31f8b4bc2e2c0442a5df2db9657dcdeee656a8b132419059f27068cd730437bd",
    ),
    "search": ({"pp": 2, "schedule": "search"}, "b3a20e1845b4d5c4aa07b7b34c7bcce28620a99e556450a62cac63dbdcc3ade8"),
    "memory": (
        {"pp": 2, "schedule": "1f1b", "memory_tokens": 256},
        "6207a5ec12e76f0acc9ef38a7a2b4db261366433360417107d53005e0d4be0f5",
    ),
    "auto": (
        {"dp": 2, "pp": 4, "seed": 3, "cp": "off"},
        "d1e35301452b372c0b847ebf1c5460ace137cab039a36a9f2ce2afd4a1a51d23",
    ),
    "auto within memory": (
        {"pp": 2, "memory_tokens": 128},
        "bad16928b972f8a63d9274c15c3434759eafb67a0733dafdec0fb7a919032db4",
    ),
    "K by length": (
        {"k_by_length": ((128, 2), (512, 4))},
        "bef0659de311643d5f5c73e700e093b619a75f36b17f8972a291b8fe5d5c1a9e",
    ),
    "equal chunks": (
        {"dp": 3, "equal_chunks": True, "cp": "off"},
        "7b2b5ae4281657444dae6f9a8953e1f5eb9b2c20c3fa994c475db5fafc25cb7c",
    ),
    "even parts": (
        {"split": "even", "tail_sharing": False},
        "d7076b844f4278e66d2cc3ccb05e00ca800bc2ac469a378c57f6eafb4b7dd418",
    ),
    "searched balance": (
        {"dp": 2, "balance": "search"},
        "ec5cd5a8066c02f108a8611bf1a1f5ac39886f6e10e78ea120c9fe9b904d6f1e",
    ),
    "two epochs": (
        {"epochs": 2, "last_batch": "drop"},
        "be2f1e4cf633423cd091aabfd87829d565603d52a969bc03835ba4ebb79c7f41",
    ),
    "shared sequences": (
        {"dp": 4, "cp": "auto"},
        "7020253afebcdb092dff92624fd236f918d2ae9a0f71adef3f8d52005def3866",
    ),
    "shared sequences on a pipeline": (
        {"dp": 4, "pp": 2, "schedule": "1f1b", "cp": "auto", "seed": 3},
        "74ef2e8f8d2c8d7a9b67dbae71dc99ab8cdf9c969facddccc55aa4a74ccf7cf8",
    ),
    "shared sequences, scheduled together": (
        {"dp": 4, "pp": 2, "seed": 3},
        "64d09296072ddc83205e4ac4fbefba53ecede11aebfcba5a398231672ad7b179",
    ),
    "hold-out": ({"holdout": 0.2}, "4abd21453232356c3bbf9e58aa2da05795a7a61e4816bdb3868b9d4ac87aa658"),
    "mix": (
        {"mix": {"more.jsonl": 1.5}, "epochs": 2},
        "e5a026a14ae0104f1c08d2ee47a10871982b67272d4a4c7767869a57e8fae03c",
    ),
}


def test_the_analysis_of_a_dataset_is_the_same_in_every_release(tmp_path: Path) -> None:
    files = [GOLDEN / "data.jsonl", GOLDEN / "more.jsonl"]
    analysis = analyze(files, tmp_path / "analysis", IntakeOptions(on_error="skip"), cache=tmp_path / "cache")
    assert analysis.content_hash == ANALYSIS_HASH


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_configuration_is_the_same_in_every_release(name: str, tmp_path: Path) -> None:
    config, expected = PLANS[name]
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", PlanConfig(**{**SMALL, **config}))
    assert plan.content_hash == expected


def test_a_plan_for_adapters_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Its costs and times are those of adapters. Others say nothing of these."""
    config = PlanConfig(**SMALL, pp=3, schedule="zero-bubble")
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", config, cost=CostModel(lora_rank=16, load_in_4bit=True))
    assert plan.content_hash == "f9d23e1868b9ed2ef81f266c44b1358f6dab3ef918f030380cb68196ff973f49"
    assert load_plan(plan.path).cost == CostModel(lora_rank=16, load_in_4bit=True)
    assert validate(plan.path).ok
    whole = build(GOLDEN / "analysis-5", tmp_path / "whole", config)
    assert whole.content_hash == PLANS["zero-bubble"][1]
    assert not {"lora_rank", "load_in_4bit"} & whole.manifest["predictions"]["cost_model"].keys()


def test_what_is_held_out_is_the_same_in_every_release(tmp_path: Path) -> None:
    config, _ = PLANS["hold-out"]
    held_out = load_held_out(build(GOLDEN / "analysis-5", tmp_path / "plan", PlanConfig(**{**SMALL, **config})))
    assert held_out is not None
    assert held_out.content_hash == "90f9cd59a9ea7cdf47bd95752daa403ced88b7b2a0b79c4bb07640887676a574"


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_plan_of_this_version_is_read_and_valid(version: int) -> None:
    plan = load_plan(GOLDEN / f"plan-{version}")
    assert plan.manifest["schema_version"] == version
    assert validate(plan.path).ok
    assert [step.step for step in plan.iter_steps()] == [0, 1, 2, 3]
    assert plan.content_hash == (PLAN_3_HASH if version == 3 else PLANS["1F1B"][1])


def test_a_plan_in_which_ranks_share_sequences_is_read_and_valid() -> None:
    plan = load_plan(GOLDEN / "plan-5-shared")
    assert plan.config.cp == "auto"
    assert validate(plan.path).ok
    assert plan.content_hash == "4af84ac04a181e3796b034dcf8dc8f0b44c727303a29941b9d7de5b2aa98fe31"
    shared = [chunk for step in plan.iter_steps() for chunk in step.chunks[3] if chunk.cp_size > 1]
    assert {(chunk.cp_first_rank, chunk.cp_size, chunk.cp_heads) for chunk in shared} == {
        *((0, 4, 4), (0, 4, 1), (2, 2, 1))
    }
    assert all(chunk.cp_tokens > chunk.num_tokens > 0 and chunk.kind == "dependent" for chunk in shared)


def test_a_plan_without_shared_sequences_says_nothing_of_them(tmp_path: Path) -> None:
    """Neither in its configuration, which is hashed, nor in its columns: it is the one that was built before."""
    config, expected = PLANS["1F1B"]
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", PlanConfig(**{**SMALL, **config}))
    assert plan.content_hash == expected
    assert "cp" not in plan.manifest["config"]
    assert pq.read_schema(plan.path / "chunks.parquet").names == CHUNKS.names
    assert not {*CHUNKS.names} & {*CP_COLUMNS}
    assert load_plan(plan.path).config.cp == "off"


def test_a_plan_of_version_3_is_still_built_as_it_was(tmp_path: Path) -> None:
    assert build(GOLDEN / "lengths.npy", tmp_path / "plan", PlanConfig(**PLAN_3)).content_hash == PLAN_3_HASH


@pytest.mark.parametrize("version", [4, 5])
def test_an_analysis_of_this_version_is_read_and_valid(version: int) -> None:
    analysis = load_analysis(GOLDEN / f"analysis-{version}")
    assert analysis.manifest["schema_version"] == version
    assert analysis.content_hash == ANALYSIS_HASH
    assert validate(analysis.path).ok


@pytest.mark.parametrize(("kind", "version"), [("plan", 1), ("plan", 2), ("analysis", 3)])
def test_an_older_version_is_refused_by_name(kind: str, version: int) -> None:
    load = load_plan if kind == "plan" else load_analysis
    with pytest.raises(DataError, match=f"written by schema version {version} .* reads .* from version") as refused:
        load(GOLDEN / f"{kind}-{version}")
    assert "write it again" in refused.value.hint


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_newer_version_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Whatever else it holds: its manifest need not have what ours has."""
    (tmp_path / MANIFEST).write_text(f'{{"kind": "{kind}", "schema_version": 999, "tool_version": "9.1"}}')
    load = load_plan if kind == "plan" else load_analysis
    with pytest.raises(DataError, match=r"written by schema version 999 \(chunkplan 9.1\)") as refused:
        load(tmp_path)
    assert "upgrade chunkplan" in refused.value.hint
