"""Golden files are read, other schema versions refused by name, and content hashes stay what they are.

`tests/golden/` holds a small dataset and what the schema version of today makes of it. A hash here that no longer holds
means that plans which were built before differ from those built now. That may be right, but never by accident.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.support.trees import build_trees, rollouts, traces

ANALYSIS_HASH = "04c12a864976e44633fc8ae2fe7e73ea105d9724fb8a856d26f0480a859c784c"

SMALL: dict[str, Any] = {"chunk_size": 64, "k": 1, "global_batch": 16, "keep_attention": "off"}

#: What a plan of the golden analysis has beside `SMALL`, and its content hash, which covers costs and times (float32).
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, "c67c4151e553d78493a9ae075a72b0383acc65ef3fc8db0b12f03e93c878478e"),
    "1F1B": (
        {"dp": 2, "pp": 2, "schedule": "1f1b", "cp": "off", "seed": 3},
        "41ef7841e94c7f4e202a894dc64c4fdb72805f858299527cfe4164a488f3d44c",
    ),
    "interleaved": (
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        "ffd44a6de65d446db19295b593b64659924f6e2fea9db02115d5711d1b06427c",
    ),
    "zero-bubble": (
        {"pp": 3, "schedule": "zero-bubble"},
        "866afc8963f63650b52146482c30b63a2575e3d9e3d76e291ffb4332c1d073c1",
    ),
    "zero-bubble-v": (
        {"pp": 3, "schedule": "zero-bubble-v"},
        "f281ff09e8a5a0406014cb759daf11642eed000671d6873233a3fe04e5d01d59",
    ),
    "search": ({"pp": 2, "schedule": "search"}, "961f884b8243377a8783a60d59b394802f5eec7a6181d78cc8baea5aacafacdc"),
    "memory": (
        {"pp": 2, "schedule": "1f1b", "memory_tokens": 256},
        "72fd1e5d13ac924b98373a7da2ac994d1d773cf38d8f3433e6a1b00950f56c12",
    ),
    "auto": (
        {"dp": 2, "pp": 4, "seed": 3, "cp": "off"},
        "e4b3b9b84d6ed36cdd90fa01a8496ad41243e8732d96ab4e85d4bc1d875b7b08",
    ),
    "auto within memory": (
        {"pp": 2, "memory_tokens": 128},
        "81dad052fb422ada384ed8fb6c294464fe8f4102572de8b544ee9ef75bd08866",
    ),
    "K by length": (
        {"k_by_length": ((128, 2), (512, 4))},
        "0412bd54d71afac3cedab3fcf73f2d8c7f2a87ac69de5728cfbe57398af885f1",
    ),
    "equal chunks": (
        {"dp": 3, "equal_chunks": True, "cp": "off"},
        "726c1e8f0c9f081346d393893d1f09514c5eabfa59ef38d93f242d3130d60bd6",
    ),
    "even parts": (
        {"split": "even", "tail_sharing": False},
        "997bcfe3d005af33f80e8f785fcafd4797c83a1f8b1d50dd689212e31ac45f9e",
    ),
    "searched balance": (
        {"dp": 2, "balance": "search"},
        "d29ea34f3d00b66b69287c63f5c7e4c7683c36c25ce66cad34611be0cec7efe2",
    ),
    "two epochs": (
        {"epochs": 2, "last_batch": "drop"},
        "9eed74a3debe562c8388842c99b1f65bcb0e50ad2cc09c0f24008d48dcdac54e",
    ),
    "shared sequences": ({"dp": 4, "cp": "auto"}, "520cc0e4f71ef0645eadb3a8b1570701396abb245ab6922af582ecead0a48179"),
    "shared sequences on a pipeline": (
        {"dp": 4, "pp": 2, "schedule": "1f1b", "cp": "auto", "seed": 3},
        "304903c55196a7d4c4c0f1ee918a662a0886944fc374d404128968123ac57eac",
    ),
    "shared sequences, scheduled together": (
        {"dp": 4, "pp": 2, "seed": 3},
        "a68aa0fc8732377c8e074e001a804b92c97a517102ca062c636cf3d98ea7d92f",
    ),
    "hold-out": ({"holdout": 0.2}, "f74fcbc79678269683c478f0a1f20ea268b90a243ac07f2797b42d96de38b151"),
    "mix": (
        {"mix": {"more.jsonl": 1.5}, "epochs": 2},
        "be0725e30fdb31c6a4216f0d8f24b565e449857950c5b3f292cafdceb6ffe23a",
    ),
    "kept attention": (
        {"dp": 2, "pp": 2, "keep_attention": "auto"},
        "0d66b0e4c45c52fdc151c5a82a69bf86e410f1c7d77dc9db8d3c0af0086410d3",
    ),
}


def test_the_analysis_of_a_dataset_is_the_same_in_every_release(tmp_path: Path) -> None:
    files = [GOLDEN / "data.jsonl", GOLDEN / "more.jsonl"]
    analysis = analyze(files, tmp_path / "analysis", IntakeOptions(on_error="skip"), cache=tmp_path / "cache")
    assert analysis.content_hash == ANALYSIS_HASH


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_configuration_is_the_same_in_every_release(name: str, tmp_path: Path) -> None:
    config, expected = PLANS[name]
    plan = build(GOLDEN / "analysis-7", tmp_path / "plan", PlanConfig(**{**SMALL, **config}), cost=plain_cost())
    assert plan.content_hash == expected


def test_a_plan_with_trees_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Three prompts and their answers, one of which is more than a chunk, and traces that branch anywhere."""
    random = np.random.default_rng(7)
    sequences = rollouts(random, [150, 40, 33], 6, 90) + traces(random, 14, 120)
    plan = build_trees(tmp_path, sequences, k=2, dp=2, pp=2)
    assert plan.content_hash == "23c9e44c05aed83b880c2e0a905dbbdc41609ce04dff2d784e1611cd5fb27574"
    assert validate(plan.path).ok
    assert plan.manifest["totals"]["num_run_tokens"] < 0.75 * plan.manifest["totals"]["num_tokens"]
    steps = list(plan.iter_steps())
    read = [(step.step, sequence, *begins) for step in steps for sequence, begins in step.prefixes.items()]
    assert read == [tuple(row.values()) for row in plan.prefixes().to_pylist()]
    chunks = [chunk for step in steps for rank in step.chunks.values() for chunk in rank]
    assert any(chunk.group_index < chunk.last_dependent < chunk.group_size - 1 for chunk in chunks)


def test_a_plan_for_adapters_is_the_same_in_every_release(tmp_path: Path) -> None:
    """Its costs and times are those of adapters. Others say nothing of these."""
    config = PlanConfig(**SMALL, pp=3, schedule="zero-bubble")
    plan = build(GOLDEN / "analysis-7", tmp_path / "plan", config, cost=plain_cost(lora_rank=16, load_in_4bit=True))
    assert plan.content_hash == "cac2ef83fe547eb191de430630c4470cb8e0bab0b55625a055850af3f3a5569a"
    assert load_plan(plan.path).cost == plain_cost(lora_rank=16, load_in_4bit=True)
    assert validate(plan.path).ok
    whole = build(GOLDEN / "analysis-7", tmp_path / "whole", config, cost=plain_cost())
    assert whole.content_hash == PLANS["zero-bubble"][1]
    assert not {"lora_rank", "load_in_4bit", "optimizer"} & whole.manifest["predictions"]["cost_model"].keys()


def test_what_is_held_out_is_the_same_in_every_release(tmp_path: Path) -> None:
    config, _ = PLANS["hold-out"]
    settings = PlanConfig(**{**SMALL, **config})
    held_out = load_held_out(build(GOLDEN / "analysis-7", tmp_path / "plan", settings, cost=plain_cost()))
    assert held_out is not None
    assert held_out.content_hash == "d688f4579cc9a7a9e122f5c546f30482c5b2a9a0e1b86fe7b778819e46366008"


def test_a_plan_of_this_version_is_read_and_valid() -> None:
    plan = load_plan(GOLDEN / "plan-7")
    assert plan.manifest["schema_version"] == 7
    assert validate(plan.path).ok
    assert [step.step for step in plan.iter_steps()] == [0, 1, 2, 3]
    assert plan.content_hash == PLANS["1F1B"][1]


def test_a_plan_in_which_ranks_share_sequences_is_read_and_valid() -> None:
    plan = load_plan(GOLDEN / "plan-7-shared")
    assert plan.config.cp == "auto"
    assert validate(plan.path).ok
    assert plan.content_hash == "304903c55196a7d4c4c0f1ee918a662a0886944fc374d404128968123ac57eac"
    shared = [chunk for step in plan.iter_steps() for chunk in step.chunks[3] if chunk.cp_size > 1]
    assert {(chunk.cp_first_rank, chunk.cp_size, chunk.cp_heads) for chunk in shared} == {(0, 4, 1), (2, 2, 1)}
    assert all(chunk.cp_tokens > chunk.num_tokens > 0 and chunk.kind == "dependent" for chunk in shared)


def test_a_plan_without_shared_sequences_says_nothing_of_them(tmp_path: Path) -> None:
    """Neither in its configuration, which is hashed, nor in its columns: it is the one that was built before."""
    config, expected = PLANS["1F1B"]
    plan = build(GOLDEN / "analysis-7", tmp_path / "plan", PlanConfig(**{**SMALL, **config}), cost=plain_cost())
    assert plan.content_hash == expected
    assert "cp" not in plan.manifest["config"]
    assert pq.read_schema(plan.path / "chunks.parquet").names == CHUNKS.names
    assert not {*CHUNKS.names} & {*CP_COLUMNS}
    assert load_plan(plan.path).config.cp == "off"


def test_a_plan_of_lengths_alone_is_the_same_in_every_release(tmp_path: Path) -> None:
    config = PlanConfig(**{**SMALL, **PLANS["1F1B"][0]})
    plan = build(GOLDEN / "lengths.npy", tmp_path / "plan", config, cost=plain_cost())
    assert plan.content_hash == "e29850b7dfc5021be15686d2b126dcea8c02c9dc7a85e2def2a4c10403252bb9"


def test_an_analysis_of_this_version_is_read_and_valid() -> None:
    analysis = load_analysis(GOLDEN / "analysis-7")
    assert analysis.manifest["schema_version"] == 7
    assert analysis.content_hash == ANALYSIS_HASH
    assert validate(analysis.path).ok


@pytest.mark.parametrize(("version", "hint"), [(5, "again"), (999, "upgrade chunkplan, or analyze .*again")])
@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_another_version_is_refused_by_name(kind: str, version: int, hint: str, tmp_path: Path) -> None:
    """Whatever else it holds: its manifest need not have what ours has."""
    (tmp_path / MANIFEST).write_text(f'{{"kind": "{kind}", "schema_version": {version}, "tool_version": "9.1"}}')
    load = load_plan if kind == "plan" else load_analysis
    with pytest.raises(DataError, match=rf"written by schema version {version} \(chunkplan 9.1\)") as refused:
        load(tmp_path)
    assert refused.value.exit_code == 3
    assert re.search(hint, refused.value.hint)
