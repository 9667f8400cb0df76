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
WRITTEN = {6: "8d413f145f6274f7e420651b74a9256d0c3150b806240be76c3dd6d6487d1c5f"}

#: What a plan of the golden analysis has beside `SMALL`, and its content hash, which covers costs and times (float32).
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, "1c4837add6d5fbffc15736bf46924558031cb766b7cb24b9c94b425a05c167b9"),
    "1F1B": (
        {"dp": 2, "pp": 2, "schedule": "1f1b", "cp": "off", "seed": 3},
        "8d413f145f6274f7e420651b74a9256d0c3150b806240be76c3dd6d6487d1c5f",
    ),
    "interleaved": (
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        "f69a7bfe13cd2732772cac82931f9f59826d91c5e9baa1e509a3ff1ba1547bdd",
    ),
    "zero-bubble": (
        {"pp": 3, "schedule": "zero-bubble"},
        "ea30d94906fc84a8f63c5e2382df1c26ba85073b25f91467ea9e440ab0580efd",
    ),
    "zero-bubble-v": (
        {"pp": 3, "schedule": "zero-bubble-v"},
        "caad19e41c2e8f2568d3d82682d412d9489f81a757a2c6fe4ec6e37a2e5b37af",
    ),
    "search": ({"pp": 2, "schedule": "search"}, "dce4d1cceacd94938049bcaf16d48b95c8a43a43b54036f4fcf559e2e11da12c"),
    "memory": (
        {"pp": 2, "schedule": "1f1b", "memory_tokens": 256},
        "b4084de193f857bdcc03a74b88ec4f6a77e7586e9edd1ace3c89684372da9d9d",
    ),
    "auto": (
        {"dp": 2, "pp": 4, "seed": 3, "cp": "off"},
        "e898a8ef07d3303c7b857ca4f83f924758a3f4437b0f27de8bad4d813355e06b",
    ),
    "auto within memory": (
        {"pp": 2, "memory_tokens": 128},
        "fd9163fbd7c3d32574990f0934e3aa57d50796bd2146b4d7d73edcb227f41453",
    ),
    "K by length": (
        {"k_by_length": ((128, 2), (512, 4))},
        "607d66a4dd0f05d4c03f61940dc5501d9d773e1a8b014dead19cbfbde45db75b",
    ),
    "equal chunks": (
        {"dp": 3, "equal_chunks": True, "cp": "off"},
        "5d0e7581c4983c2a67ba37bd88aaaf0336113ca13662889785994921dccbf3c0",
    ),
    "even parts": (
        {"split": "even", "tail_sharing": False},
        "3461065eec692b1b0659a9e691e93647be84bfb82cc0a0f225fb142cc26c60a6",
    ),
    "searched balance": (
        {"dp": 2, "balance": "search"},
        "628f51b127460b2d2446536f0e1ed58a7f51245d9ed68a57d9d4856407e0e369",
    ),
    "two epochs": (
        {"epochs": 2, "last_batch": "drop"},
        "082938a846a9d95675ef1de6b54c47f7e04074c72a288c1df34b3813213bc0b7",
    ),
    "shared sequences": (
        {"dp": 4, "cp": "auto"},
        "5065dac9bb84b25d6098468bd071e389164a5f196e1defe13baf98137bbec703",
    ),
    "shared sequences on a pipeline": (
        {"dp": 4, "pp": 2, "schedule": "1f1b", "cp": "auto", "seed": 3},
        "12d951b4178dbc9a825d172ecef590e8471b9127ebf60a2272e3d33caace6128",
    ),
    "shared sequences, scheduled together": (
        {"dp": 4, "pp": 2, "seed": 3},
        "47d7af82f7853ee50a76359c305e1e07ece9174b2920679b2492063f5c48e8d8",
    ),
    "hold-out": ({"holdout": 0.2}, "56fffb71008a310f79369649a03525afc666eac0799c8801a62034ee8659cc4f"),
    "mix": (
        {"mix": {"more.jsonl": 1.5}, "epochs": 2},
        "3e54e5116b0440fdb3a913d162365fc834664d94472d4a7dfd89b2ae4b959685",
    ),
    "kept attention": (
        {"dp": 2, "pp": 2, "keep_attention": "auto"},
        "43c4d3e92b70609f5074dfaadc60169bfca6c2eb37857f2c332e62d05b5d1950",
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
    assert plan.content_hash == "942e5a0297cdbb84a2f6c36bfc37734d4e546f64cabc798d48e0dcdba78a6cdb"
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
    assert held_out.content_hash == "9816eb8176c759a2fd9a291870915a5a349eafbc2b9e72495edcca5b49df75f3"


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
    assert plan.content_hash == "12d951b4178dbc9a825d172ecef590e8471b9127ebf60a2272e3d33caace6128"
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
    assert plan.content_hash == "14966771d17342b76fb475c5836d72eaa7d477392fb3d9dcea19120dba134d7e"


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
