"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from chunkplan.cost.model import CostModel
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.plan_writer import PlanWriter
from chunkplan.planfile.schema import plan_schemas
from tests.support.command_line import Ran, Run
from tests.support.places import ROOT
from tests.support.process_pool import ProcessPool

# Workers of pytest-xdist ignore it, and so does what is started in the background of a script; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run side by side: every torchrun takes a free port rather than the one it has for all.
os.environ["PET_STANDALONE"] = "1"

# Tests of a GPU need neither of these two, and machines that have one may not have them.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # The first example of a test may have to compile what it calls, and the machine may be busy.
    settings.register_profile("chunkplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("chunkplan")

with suppress(ModuleNotFoundError):
    import typer.main

    # A command line in this process builds its parser anew for every call, which takes longer than most of the calls.
    typer.main.get_command = cache(typer.main.get_command)

#: What takes longest begins first, so that no process of pytest-xdist has one of them left at the end. While the first
#: that builds plans compiles the planner's loops, those after it need none of them, and do not compile the same again.
LONGEST = (
    "runtime/test_gpu",  # which is skipped at once, or of the tests of a GPU tells most
    "runtime/distributed/test_sharing",
    *("runtime/failures/test_watchdog", "runtime/models/test_compiled", "intake/test_left_over"),
    *("intake/test_interrupts", "intake/test_loss_flags", "runtime/models/test_recurrent"),
    *("runtime/distributed/test_train", "runtime/distributed/test_gradients", "runtime/distributed/test_held_memory"),
    *("tuning/test_search", "tuning/test_tuning", "cli/test_tune", "reporting/page/test_browser"),
    *("runtime/distributed/test_train_sharing", "runtime/training/test_resume", "runtime/proof/test_prove"),
    *("runtime/training/test_chunk_trainer", "runtime/test_parity", "test_clean_environment"),
)

#: (sequence_id, start, end)
Piece = tuple[int, int, int]


class Tree(NamedTuple):
    """Prefixes as in `PlanStep.prefixes`; by chunk_id columns of its row, and the chunks that attend to it."""

    prefixes: Mapping[int, tuple[int, int]]
    columns: Mapping[int, dict[str, Any]]
    dependents: Mapping[int, Sequence[int]]


HandmadePlan = Callable[..., tuple[Path, Path]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `chunkplan ARGUMENTS` in an empty folder, in a terminal of `width` columns, with colour or without."""
    from chunkplan_cli.app import run_command

    monkeypatch.chdir(tmp_path)
    for name in ("CHUNKPLAN_TOKENIZER", "CHUNKPLAN_WORKSPACE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: object, width: int = 80, colour: bool = False) -> Ran:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(width))
            if colour:
                patch.setenv("FORCE_COLOR", "1")
                patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "argv", ["chunkplan", *map(str, arguments)])
            try:
                run_command()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err, captured.err
        return Ran(code, captured.out, captured.err)

    return invoke


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, not what is in them."""
    place = {ROOT / "tests" / f"{name}.py": at for at, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in place)
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> None:
    """What the files before have left, compilers above all, is not looked at in every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Processes that are one group."""
    started = ProcessPool(joined=True)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def trainers() -> Iterator[ProcessPool]:
    """Processes that runs begin on, which make their groups themselves."""
    started = ProcessPool(joined=False)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """`make(model_type, **changes)` -> the config.json of a model small enough to run in moments."""

    def make(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
        base = {
            "model_type": model_type,
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "sliding_window": None,
        }
        return {**base, **changes}

    return make


@pytest.fixture(scope="session")
def random_sequences() -> Callable[..., list[tuple[Any, Any]]]:
    """`make(lengths, seed=0)` -> token ids below 97 and target masks: a prompt, then mostly targets."""

    def make(lengths: Sequence[int], seed: int = 0) -> list[tuple[Any, Any]]:
        random = np.random.default_rng(seed)
        sequences = []
        for length in lengths:
            target = (np.arange(length) > length // 3) & (random.random(length) < 0.9)
            target[0] = False
            sequences.append((random.integers(0, 97, length), target))
        return sequences

    return make


@pytest.fixture(scope="session")
def handmade_plan(tmp_path_factory: pytest.TempPathFactory) -> HandmadePlan:
    """Writes a plan whose chunks are given: for plans that the planner would not make, such as mixed chunks.

    `write(sequences, steps, k=1, dp=1, pp=1, actions=None, kept=None)` -> (plan, analysis). `sequences` are pairs of
    token ids and target mask; `steps` a list of {dp_rank: [chunk, ...]}, a chunk being a list of pieces (sequence_id,
    start, end), empty for a zero-loss chunk. Actions are those of Algorithm 2 on one stage, unless `actions` gives
    (op, chunk_id) for every rank. `kept`: by its chunk_id, where a chunk keeps attention for its recompute. `tree`: the
    sequences of step 0 that begin in others, and what its chunks are beside `_chunk_rows`.
    """

    def write(
        sequences: Sequence[tuple[Any, Any]],
        steps: Sequence[dict[int, list[list[Piece]]]],
        *,
        k: int = 1,
        dp: int = 1,
        pp: int = 1,
        actions: Sequence[tuple[str, int]] | None = None,
        kept: Mapping[int, str] | None = None,
        tree: Tree | None = None,
    ) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("handmade")
        analysis = folder / "analysis"
        analysis.mkdir()
        writer = AnalysisWriter(analysis)
        for record, (ids, target) in enumerate(sequences):
            writer.add(0, record, np.asarray(ids, np.int32), np.asarray(target, bool))
        described = writer.finish(exact=True, sources=[])
        tables: dict[str, list[dict[str, Any]]] = {"steps": [], "chunks": [], "schedule": []}
        for step, ranks in enumerate(steps):
            rows = [
                {"step": step, "dp_rank": rank, **row, "kept_attention": (kept or {}).get(row["chunk_id"], "")}
                for rank, chunks in sorted(ranks.items())
                for row in _chunk_rows(chunks, sequences, k)
            ]
            if tree is not None:
                rows = [{**row, **tree.columns[row["chunk_id"]]} for row in rows]
            tables["chunks"] += rows
            num_slots = 0
            for rank in sorted(ranks):
                own = [row for row in rows if row["dp_rank"] == rank]
                ops = _algorithm_2(own) if actions is None else actions
                tables["schedule"].append(
                    {
                        "step": step,
                        "dp_rank": rank,
                        "stage": 0,
                        "actions": [{"op": op, "chunk_id": chunk, "virtual_stage": 0} for op, chunk in ops],
                        "predicted_us": 1.0,
                        "slots": list(range(num_slots, num_slots + len(ops))),  # nobody else is in them
                    }
                )
                num_slots += len(ops)
            tables["steps"].append(
                {
                    "step": step,
                    "epoch": 0,
                    "num_sequences": sum(piece["start"] == 0 for row in rows for piece in row["segments"]),
                    "num_tokens": sum(row["num_tokens"] for row in rows),
                    "num_target_tokens": sum(row["num_target_tokens"] for row in rows),
                    "num_chunks": len(rows),
                    "chunks_lower_bound": 1,
                    "packing_lower_bound": 1,
                    "optimal": False,
                    "exceeds_share": False,
                    "peak_retained_tokens": 1,
                    "recompute_us": 0.0,
                    "predicted_us": 1.0,
                    "lower_bound_us": 1.0,
                }
            )
        schemas = plan_schemas({"dp": dp, "share_prefixes": tree is not None})
        if tree is not None:
            names = schemas["prefixes"].names
            tables["prefixes"] = [dict(zip(names, (0, b, *of), strict=True)) for b, of in sorted(tree.prefixes.items())]
            for step in tables["steps"]:
                step["num_sequences"], step["num_target_tokens"] = (
                    len(sequences),
                    sum(int(t.sum()) for _, t in sequences),
                )
        written = {name: pa.Table.from_pylist(rows, schemas[name]) for name, rows in tables.items()}
        chunk_size = max(row["num_tokens"] for row in tables["chunks"])
        plan = folder / "plan"
        plan.mkdir()
        writer = PlanWriter(plan, schemas)
        writer.add(written)
        writer.finish(
            config={
                "chunk_size": chunk_size,
                "k": k,
                "k_by_length": None,
                "dp": dp,
                "pp": pp,
                "schedule": "algorithm2",
                "virtual_stages": 1,
                "memory_tokens": None,
                "global_batch": len(sequences),
                "epochs": 1,
                "last_batch": "keep",
                "seed": 0,
                "split": "full",
                "tail_sharing": True,
                "packing": "auto",
                "balance": "spread",
                "equal_chunks": False,
                "holdout": None,
                "part": "train",
                "mix": None,
                **({} if tree is None else {"share_prefixes": True}),
            },
            seed=0,
            epochs=1,
            analysis={"path": "../analysis", "content_hash": described["content_hash"], "exact": True},
            selection={
                "num_sequences": len(sequences),
                "num_held_out": 0,
                "num_occurrences": len(sequences),
                "sources": [],
            },
            totals={
                "num_steps": len(steps),
                "num_chunks": len(tables["chunks"]),
                "num_sequences": len(sequences),
                "num_tokens": sum(row["num_tokens"] for row in tables["steps"]),
                "num_target_tokens": sum(row["num_target_tokens"] for row in tables["steps"]),
                "longest_sequence": max(len(ids) for ids, _ in sequences),
                "num_dropped_sequences": 0,
            },
            predictions={"cost_model": CostModel().to_dict(), "predicted_us": 1.0, "lower_bound_us": 1.0},
        )
        return plan, analysis

    return write


def _chunk_rows(chunks: list[list[Piece]], sequences: Sequence[tuple[Any, Any]], k: int) -> list[dict[str, Any]]:
    split = [
        next((piece for piece in chunk if piece[2] - piece[1] < len(sequences[piece[0]][0])), None) for chunk in chunks
    ]
    groups = _groups(split)
    rows = []
    for chunk_id, (chunk, piece) in enumerate(zip(chunks, split, strict=True)):
        group = groups[chunk_id]
        size, index = (groups.count(group), groups[:chunk_id].count(group)) if piece else (1, 0)
        rows.append(
            {
                "chunk_id": chunk_id,
                "group_id": group,
                "group_index": index,
                "group_size": size,
                "num_tokens": sum(end - start for _, start, end in chunk),
                "num_target_tokens": sum(int(np.sum(sequences[i][1][start + 1 : end + 1])) for i, start, end in chunk),
                "prefix_tokens": piece[1] if piece else 0,
                "keeps_activations": index >= size - k,
                "cost": 1.0,
                "segments": [{"sequence_id": i, "start": start, "end": end} for i, start, end in chunk],
            }
        )
    return rows


def _groups(parts: list[Piece | None]) -> list[int | None]:
    """The group of each chunk: a part continues the first group of its sequence that ends where it starts, or none."""
    reached: list[tuple[int, int]] = []  # by group: its sequence_id and how far it has come
    groups: list[int | None] = []
    for part in parts:
        if part is None:
            groups.append(None)
            continue
        sequence_id, start, end = part
        if (sequence_id, start) not in reached:
            reached.append((sequence_id, start))
        groups.append(reached.index((sequence_id, start)))
        reached[groups[-1]] = sequence_id, end
    return groups


def _algorithm_2(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """ChunkFlow (arXiv 2503.02356), Algorithm 2: a group where its first part is, everything else at once."""
    actions: list[tuple[str, int]] = []
    for row in rows:
        if row["group_index"]:
            continue
        group = [row]
        if row["group_id"] is not None:
            group = [other for other in rows if other["group_id"] == row["group_id"]]
        actions += [("forward" if part["keeps_activations"] else "forward_kv", part["chunk_id"]) for part in group]
        for part in reversed(group):
            actions += [] if part["keeps_activations"] else [("recompute", part["chunk_id"])]
            actions.append(("backward", part["chunk_id"]))
    return actions


def pytest_collection_finish() -> None:
    """What is imported by now stays, and is much: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
