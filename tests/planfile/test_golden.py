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

from chunkplan import PlanConfig, analyze, build, load_analysis, load_plan, validate
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError
from chunkplan.files.folder import MANIFEST
from chunkplan.planfile.load import load_held_out
from chunkplan.planfile.schema import CHUNKS, CP_COLUMNS
from tests.support.places import GOLDEN
from tests.support.plain import plain_cost

ANALYSIS_HASH = "04c12a864976e44633fc8ae2fe7e73ea105d9724fb8a856d26f0480a859c784c"

SMALL: dict[str, Any] = {"chunk_size": 64, "k": 1, "global_batch": 16}

#: Content hashes of the plans that releases wrote, by schema version: with the times that these predicted.
WRITTEN = {
    3: "6718d933b9a563d952258c061e3149b274ef575dd4b704019d51b0461c2402ae",
    4: "5df0533014a0534bd4548d986793ea654bc09e7c6cf85b75911e14df452f2e62",
    5: "5df0533014a0534bd4548d986793ea654bc09e7c6cf85b75911e14df452f2e62",
}

#: What a plan of the golden analysis has beside `SMALL`, and its content hash, which covers costs and times (float32).
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, "3c384bb464811598b61c8afe5b3c50863b0c1ed26776a86b8711bc52e552e02e"),
    "1F1B": (
        {"dp": 2, "pp": 2, "schedule": "1f1b", "cp": "off", "seed": 3},
        "7c8f4c747a7811e5cbfed03634aabc01ed3debdc146e28682dbe956d13de0cad",
    ),
    "interleaved": (
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        "d8869bce30f8948de015d62eb9ebcb0d4e1072ea2052dca0b872c54b6cb54592",
    ),
    "zero-bubble": (
        {"pp": 3, "schedule": "zero-bubble"},
        "c52e5f33609e8700d46e3da2455a0d99a228b95bc71ba700b3fc25eef8600fe3",
    ),
    "zero-bubble-v": (
        {"pp": 3, "schedule": "zero-bubble-v"},
        "7fea237d7a0e053a3ba3fd7b64f0663a53cbe439de92e01d75d75c23985cb7f6",
    ),
    "search": ({"pp": 2, "schedule": "search"}, "9f43e00532d8ea8fbe729c2bdcaa77b759093434da77dd6b0ad787b00f0c41f0"),
    "memory": (
        {"pp": 2, "schedule": "1f1b", "memory_tokens": 256},
        "2c0289f6ea9d8a29d2552f272a6b45323002570c196f9ddeffdf766dd1cdd9f8",
    ),
    "auto": (
        {"dp": 2, "pp": 4, "seed": 3, "cp": "off"},
        "a42c3a1d2c40cf56cd4733382ea28523196866302769edc4d6fac1db1acd82d0",
    ),
    "auto within memory": (
        {"pp": 2, "memory_tokens": 128},
        "46d5cece135f9c24d3a1bba8d1a747c27ecd3940959d2a4c50ed9c39a457ed95",
    ),
    "K by length": (
        {"k_by_length": ((128, 2), (512, 4))},
        "ff283810603344799a556cf697686215ddbe5f209f1e345fe72d190b44484f8c",
    ),
    "equal chunks": (
        {"dp": 3, "equal_chunks": True, "cp": "off"},
        "8eb7fff0f55965ac999cc515153125b8b68d43734edf388a05f4e5b4ec77e235",
    ),
    "even parts": (
        {"split": "even", "tail_sharing": False},
        "4fbc90b6b0ab317b638a680c8219a505e528cfe8098d4d01f5f3d93103d119aa",
    ),
    "searched balance": (
        {"dp": 2, "balance": "search"},
        "ae5c9a9697baacd04a85ce06f44390e2c522f6b5840b279099b113f3ee24f012",
    ),
    "two epochs": (
        {"epochs": 2, "last_batch": "drop"},
        "d284119c620cf600c01b8d1078faceddcfa542759996547c3975001a865d3606",
    ),
    "shared sequences": (
        {"dp": 4, "cp": "auto"},
        "ab173936e530e6386922caba9d0c9b7259c8f8c5bee61ba1c65a88b05c4598ff",
    ),
    "shared sequences on a pipeline": (
        {"dp": 4, "pp": 2, "schedule": "1f1b", "cp": "auto", "seed": 3},
        "5260fb9d07547111070006b5d4f67661c87d9621d44ab63d2d54e925fa8e0786",
    ),
    "shared sequences, scheduled together": (
        {"dp": 4, "pp": 2, "seed": 3},
        "7d1662b71e6f04218a505911722c4ecd565772af972b872d47e845576dc39627",
    ),
    "hold-out": ({"holdout": 0.2}, "73b552f2e6642237ece038675064173a267a82c27e34f96229e45af358136bec"),
    "mix": (
        {"mix": {"more.jsonl": 1.5}, "epochs": 2},
        "42951974aa579d2801f2fcd0a379898bf9bf65a7d0105d457c6fbde5d827c44b",
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
    assert plan.content_hash == "397c49c54b881f0cfa3651c8d3e54806612ba9a49dbfb0256eefc04a9cc04a83"
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
    assert held_out.content_hash == "741a2dfcbbf3d64483f7f5596b1c8b09c28176038ab38219eb9b66631c57eda2"


@pytest.mark.parametrize("version", WRITTEN)
def test_a_plan_of_this_version_is_read_and_valid(version: int) -> None:
    plan = load_plan(GOLDEN / f"plan-{version}")
    assert plan.manifest["schema_version"] == version
    assert validate(plan.path).ok
    assert [step.step for step in plan.iter_steps()] == [0, 1, 2, 3]
    assert plan.content_hash == WRITTEN[version]


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
    plan = build(GOLDEN / "analysis-5", tmp_path / "plan", PlanConfig(**{**SMALL, **config}), cost=plain_cost())
    assert plan.content_hash == expected
    assert "cp" not in plan.manifest["config"]
    assert pq.read_schema(plan.path / "chunks.parquet").names == CHUNKS.names
    assert not {*CHUNKS.names} & {*CP_COLUMNS}
    assert load_plan(plan.path).config.cp == "off"


def test_a_plan_of_lengths_alone_is_the_same_in_every_release(tmp_path: Path) -> None:
    config = PlanConfig(**{**SMALL, **PLANS["1F1B"][0]})
    plan = build(GOLDEN / "lengths.npy", tmp_path / "plan", config, cost=plain_cost())
    assert plan.content_hash == "4821e25fe0fcbe38894e27f1ce70df589123de445b9bd75a2a786528e0d11842"


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
