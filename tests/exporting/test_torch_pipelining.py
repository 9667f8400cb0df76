"""Orders for the pipelines of torch: its own functions read them, find them in order, and run them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _simulate_comms_compute, _validate_schedule

import chunkplan
from chunkplan.errors import DataError, UsageError
from chunkplan.exporting.torch_pipelining import MICROBATCHES, OrderExport, export_order
from chunkplan.planfile.plan import Plan
from tests.support.places import section
from tests.support.plan_rows import Rows, tamper
from tests.support.process_pool import ProcessPool
from tests.support.torch_pipelining_cases import batch, gradients_of_step, layers, loss_of

LENGTHS = np.array([7, 900, 30, 64, 65, 128, 1, 300, 12, 250, 40, 2, 9, 99, 100, 33, 3, 5, 21])
FAMILIES: dict[str, dict[str, Any]] = {
    "algorithm2": {"pp": 1},
    "1f1b": {"pp": 3},
    "interleaved": {"pp": 2, "virtual_stages": 3},
    "zero-bubble": {"pp": 3},
    "zero-bubble-v": {"pp": 3},
    "search": {"pp": 2},
}


def built(folder: Path, **config: Any) -> Plan:
    np.save(folder / "lengths.npy", LENGTHS)
    settings = {"chunk_size": 64, "k": 1, "global_batch": 12, "cp": "off", **config}
    return chunkplan.build(folder / "lengths.npy", folder / "plan", chunkplan.PlanConfig(**settings))


def described(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / MICROBATCHES).read_text().splitlines()]


def loaded(path: Path) -> dict[int, list[Any]]:
    """As `_load_csv` reads a file."""
    with path.open(newline="") as file:
        return {rank: [_Action.from_str(word) for word in row] for rank, row in enumerate(csv.reader(file))}


@pytest.mark.parametrize("schedule", FAMILIES)
def test_torch_reads_every_order_and_finds_that_it_never_hangs(schedule: str, tmp_path: Path) -> None:
    plan = built(tmp_path, schedule=schedule, dp=2, **FAMILIES[schedule])
    written = export_order(plan, tmp_path / "out")
    entries = described(tmp_path / "out")
    assert [(entry["step"], entry["dp_rank"]) for entry in entries] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(entry["file"] for entry in entries),
        *(MICROBATCHES, "export.json"),
    }
    assert written.num_recomputed > 0 and written.num_parts > 0
    for entry in entries:
        actions = loaded(tmp_path / "out" / entry["file"])
        ranks = _validate_schedule(actions, plan.config.pp, written.num_stages, entry["num_microbatches"])
        with_sends = _add_send_recv(actions, ranks.__getitem__, written.num_stages)
        _simulate_comms_compute(with_sends, ranks.__getitem__, written.num_stages)
        assert [ranks[stage] for stage in range(plan.config.pp)] == list(range(plan.config.pp))
        if schedule == "zero-bubble-v":
            assert [ranks[stage] for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("schedule", FAMILIES)
def test_an_order_is_that_of_the_plan_with_micro_batches_numbered_as_they_are_forwarded(
    schedule: str, tmp_path: Path
) -> None:
    """Of every stage of the plan its actions but for recomputes, of chunks by the names they have in the file."""
    plan = built(tmp_path, schedule=schedule, **FAMILIES[schedule])
    export_order(plan, tmp_path / "out")
    letters = {"F": ("forward", "forward_kv"), "B": ("backward",), "I": ("backward_input",), "W": ("backward_weight",)}
    for step, entry in zip(plan.iter_steps(), described(tmp_path / "out"), strict=True):
        chunks = {chunk.chunk_id: chunk for chunk in step.chunks[0]}
        named = [chunks[chunk_id] for chunk_id in entry["chunk_ids"]]
        assert sorted(entry["chunk_ids"]) == sorted(chunks)
        assert entry["num_tokens"] == [chunk.num_tokens for chunk in named]
        assert entry["is_part"] == [chunk.group_id is not None for chunk in named]
        assert entry["is_recomputed"] == [not chunk.keeps_activations for chunk in named]
        for stage, of_stage in loaded(tmp_path / "out" / entry["file"]).items():
            ops = [action for action in step.actions[0, stage] if action.op != "recompute"]
            assert len(ops) == len(of_stage)
            for action, found in zip(ops, of_stage, strict=True):
                assert action.op in letters[found.computation_type.value]
                assert action.chunk_id == entry["chunk_ids"][found.microbatch_index]
            first = [found.microbatch_index for found in of_stage if found.computation_type.value == "F"]
            assert first[: len(named)] != [] and set(first) == set(range(len(named)))
            own = [each for each in of_stage if each.stage_index == of_stage[0].stage_index]
            forwarded = [each.microbatch_index for each in own if each.computation_type.value == "F"]
            assert forwarded == list(range(len(named))), "torch looks up losses by this number"


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved", "zero-bubble", "search"])
def test_torch_runs_an_order_and_its_gradients_are_those_of_the_whole_model(
    schedule: str, tmp_path: Path, pool: ProcessPool
) -> None:
    """In two processes, with chunks padded to ChunkSize; of a model whose tokens do not look at each other."""
    plan = built(tmp_path, schedule=schedule, pp=2)
    written = export_order(plan, tmp_path / "out")
    line = (tmp_path / "out" / MICROBATCHES).read_text().splitlines()[0]
    num_tokens = json.loads(line)["num_tokens"]
    assert len(set(num_tokens)) > 1
    given = {"num_stages": written.num_stages, "num_tokens": num_tokens, "chunk_size": written.chunk_size}
    found = pool.run(2, gradients_of_step, folder=str(tmp_path / "out"), line=line, **given)
    modules = layers(written.num_stages)
    inputs, targets = batch(num_tokens, written.chunk_size)
    loss_of(torch.nn.Sequential(*modules)(inputs), targets).backward()
    of_stage = {stage: gradients for each in found for stage, gradients in each.items()}
    assert sorted(of_stage) == list(range(written.num_stages))
    for stage, module in enumerate(modules):
        for parameter, gradient in zip(module.parameters(), of_stage[stage], strict=True):
            np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_the_command_says_what_torch_does_not_do(tmp_path: Path, command: Callable[..., Any]) -> None:
    plan = built(tmp_path, pp=2)
    ran = command("export", plan.path, "--to", "torch-pipelining", "--output", tmp_path / "out")
    assert ran.code == 0
    for words in ("auto on 2 stages of 2 ranks", "activation checkpointing", "have to carry keys and values"):
        assert words in ran.out
    document = json.loads(
        command("export", plan.path, "--to", "torch-pipelining", "--output", tmp_path / "out", "--json").out
    )
    assert document == json.loads((tmp_path / "out" / "export.json").read_text())
    assert document["num_microbatches"] == sum(entry["num_microbatches"] for entry in described(tmp_path / "out"))


def test_options_of_rows_and_an_analysis_are_refused(
    tmp_path: Path, command: Callable[..., Any], workspace: Path
) -> None:
    options = ("--to", "torch-pipelining", "--output", tmp_path / "out")
    ran = command("export", workspace / "plan", *options, "--whole-only", "--chunk-size", 64)
    assert ran.code == 2 and "takes no --whole-only or --chunk-size" in ran.err
    ran = command("export", workspace / "analysis", *options)
    assert ran.code == 2 and "this is an analysis" in ran.err and "chunkplan build" in ran.err
    assert not (tmp_path / "out").exists()


def crossed(rows: Rows) -> None:
    actions = rows["schedule"][1]["actions"]
    forwards = [place for place, action in enumerate(actions) if action["op"] == "forward"]
    one, other = forwards[:2]
    actions[one], actions[other] = actions[other], actions[one]


def test_a_plan_that_was_changed_or_is_out_of_order_is_refused(tmp_path: Path) -> None:
    plan = built(tmp_path, pp=2, k=20)
    tamper(plan.path, crossed)
    with pytest.raises(DataError, match="does not forward the chunks of the rank in the order of the first stage"):
        export_order(plan.path, tmp_path / "out")
    manifest = json.loads((plan.path / "manifest.json").read_text())
    manifest["content_hashes"]["schedule"] = "0" * 64
    (plan.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="content-hash"):
        export_order(plan.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_an_export_is_replaced(tmp_path: Path) -> None:
    plan = built(tmp_path, pp=2)
    export_order(plan, tmp_path / "out")
    export_order(plan, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError):
        export_order(plan, tmp_path / "other")


def test_the_page_names_every_entry() -> None:
    page = section("integrations.md", "Pipelines of torch")
    for name in OrderExport.__dataclass_fields__:
        assert f"`{name}`" in page, name


def test_a_second_forward_passes_the_checks_of_torch_and_fails_when_it_is_run(
    tmp_path: Path, pool: ProcessPool
) -> None:
    """Why a chunk that is recomputed has one forward in the file."""
    plan = built(tmp_path, pp=2)
    export_order(plan, tmp_path / "out")
    line = (tmp_path / "out" / MICROBATCHES).read_text().splitlines()[0]
    entry = json.loads(line)
    path = tmp_path / "out" / entry["file"]
    again = [number for number, is_recomputed in enumerate(entry["is_recomputed"]) if is_recomputed]
    words = [row.split(",") for row in path.read_text().splitlines()]
    twice = [
        [
            word
            for each in row
            for word in ([each.replace("B", "F")] if int(each[2:]) in again and "B" in each else []) + [each]
        ]
        for row in words
    ]
    path.write_text("".join(f"{','.join(row)}\n" for row in twice))
    actions = loaded(path)
    ranks = _validate_schedule(actions, 2, 2, entry["num_microbatches"])
    _simulate_comms_compute(_add_send_recv(actions, ranks.__getitem__, 2), ranks.__getitem__, 2)
    given = {"num_stages": 2, "num_tokens": entry["num_tokens"], "chunk_size": 64}
    with pytest.raises(AssertionError, match="before receiving input"):
        pool.run(2, gradients_of_step, folder=str(tmp_path / "out"), line=line, **given)
