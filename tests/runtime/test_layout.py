"""A layout serves all rows of a plan once; what cannot be laid out is refused by its numbers, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, build
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.distributed.stages import split_layers
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import RankLayout, choose_layout
from tests.support.analyses import write_analysis

Built = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, random_sequences: Callable[..., Any]) -> Built:
    """`build(cost, **settings)` -> (plan folder, analysis folder)."""

    def make(cost: CostModel | None = None, **settings: Any) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("layout")
        write_analysis(folder / "analysis", random_sequences([9, 20, 3, 14]))
        config = PlanConfig(**{"chunk_size": 6, "k": 1, "global_batch": 4, **settings})
        build(folder / "analysis", folder / "plan", config, cost=cost)
        return folder / "plan", folder / "analysis"

    return make


@pytest.mark.parametrize("plan_dp, pp, world_size", [(1, 1, 1), (8, 1, 4), (8, 2, 8), (6, 3, 9), (2, 4, 8), (4, 2, 2)])
def test_processes_serve_every_stage_of_every_rank_once(plan_dp: int, pp: int, world_size: int) -> None:
    plan = Plan(Path("plan"), {"config": {"pp": pp, "dp": plan_dp}})
    served = []
    for rank in range(world_size):
        layout = choose_layout(plan, world_size, rank)
        assert layout.world_size == world_size
        assert layout.rank_of(layout.stage, layout.dp_rank) == rank
        assert (layout.is_first, layout.is_last) == (layout.stage == 0, layout.stage == pp - 1)
        served += [(dp_rank, layout.stage) for dp_rank in layout.dp_ranks(plan_dp)]
    assert sorted(served) == [(dp_rank, stage) for dp_rank in range(plan_dp) for stage in range(pp)]


def test_replicas_of_a_stage_lie_side_by_side() -> None:
    layouts = [RankLayout(dp=3, pp=2, rank=rank) for rank in range(6)]
    assert [(each.stage, each.dp_rank) for each in layouts] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert layouts[0].describe(4) == "process 4 of 6 (stage 1 of pipeline 1)"
    assert RankLayout(dp=2, rank=1).describe() == "process 1 of 2 (data parallel)"


@pytest.mark.parametrize(
    "plan_dp, pp, world_size, message, hint",
    [
        (4, 1, 3, "3 processes cannot share the plan's 4 data-parallel ranks evenly", "with 1 or 2 or 4 processes"),
        (4, 1, 8, "8 processes cannot share", "another --dp"),
        (1, 1, 2, "2 processes cannot share the plan's 1 data-parallel rank evenly", "with 1 process in all"),
        (2, 4, 1, "1 process cannot share the plan's 2 data-parallel ranks of 4 stages each", "with 4 or 8 processes"),
        (2, 4, 6, "6 processes cannot share", "another --dp or --pp"),
    ],
)
def test_processes_that_do_not_fit_are_refused(plan_dp: int, pp: int, world_size: int, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        choose_layout(Plan(Path("plan"), {"config": {"pp": pp, "dp": plan_dp}}), world_size, 0)
    assert hint in str(raised.value.hint)


def test_layers_are_split_evenly_with_fewer_on_the_last_stages() -> None:
    assert split_layers(7, 1) == [range(7)]
    assert split_layers(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert split_layers(4, 4) == [range(stage, stage + 1) for stage in range(4)]
    assert split_layers(4, 3, (1, 2, 1)) == [range(1), range(1, 3), range(3, 4)]


@pytest.mark.parametrize("given", [(2, 1), (4, 0), (5, -1), (4,), (1, 1, 2), ()])
def test_layers_that_are_not_those_of_the_model_are_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="the model has 4 layers, the plan 2 stages") as raised:
        split_layers(4, 2, given)
    assert "2 numbers from 1 that sum to 4" in str(raised.value.hint)


@pytest.mark.parametrize("given", [None, (1, 1, 1), (1, 1, 1, 0)])
def test_more_stages_than_layers_are_refused(given: tuple[int, ...] | None) -> None:
    with pytest.raises(UsageError, match="4 stages for 3 layers") as raised:
        split_layers(3, 4, given)
    assert "--pp 3" in str(raised.value.hint)


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"schedule": "interleaved", "pp": 2}, "interleaved stages"),
        ({"schedule": "zero-bubble", "pp": 2}, "split backwards"),
        ({"cost": CostModel(tp=2)}, r"tensor parallelism \(tp 2\)"),
    ],
)
def test_a_plan_for_what_the_runtime_does_not_do_is_refused_by_name(
    built: Built, settings: dict[str, Any], what: str
) -> None:
    plan, analysis = built(**settings)
    with pytest.raises(UsageError, match=f"the plan is for {what}, which the runtime does not do") as raised:
        open_plan(plan, analysis, pp=settings.get("pp", 1))
    assert "build it with" in str(raised.value.hint)


@pytest.mark.parametrize("pp, message", [(1, "2 pipeline stages, one is there"), (4, "2 pipeline stages, 4 are there")])
def test_a_plan_for_other_stages_is_refused(built: Built, pp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        open_plan(*built(pp=2), pp=pp)
    assert f"--pp {pp}" in str(raised.value.hint)


@pytest.mark.parametrize("op, what", [("forward", "activations"), ("backward", "gradients")])
def test_stages_that_exchange_chunks_in_different_orders_are_refused(built: Built, op: str, what: str) -> None:
    plan, analysis = built(pp=3, k=100, dp=2)
    path = plan / "schedule.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    (row,) = (row for row in rows if (row["step"], row["dp_rank"], row["stage"]) == (0, 1, 1))
    first, second = [action for action in row["actions"] if action["op"] == op][:2]
    first["chunk_id"], second["chunk_id"] = second["chunk_id"], first["chunk_id"]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    opened = open_plan(plan, analysis, pp=3)
    for rank in range(6):
        stream = PlanStream(*opened, vocab_size=97, max_positions=20, layout=RankLayout(dp=2, pp=3, rank=rank))
        if rank % 2 == 0:
            assert len(list(stream)) == 1  # its pipeline is in order
            continue
        with pytest.raises(DataError, match=f"stages 0 and 1 exchange {what} in different orders") as raised:
            next(iter(stream))
        assert raised.value.where == "step 0, rank 1"


def test_every_process_has_the_actions_of_its_stage_and_ranks(built: Built) -> None:
    plan, analysis = open_plan(*built(pp=2, dp=4), pp=2)
    step = next(plan.iter_steps())
    for layout in (replace(RankLayout(dp=2, pp=2), rank=rank) for rank in range(4)):
        (work,) = PlanStream(plan, analysis, vocab_size=97, max_positions=20, layout=layout)
        assert [each.dp_rank for each in work.ranks] == list(layout.dp_ranks(4))
        for each in work.ranks:
            assert each.actions == step.actions[each.dp_rank, layout.stage]
            assert list(each.chunks.values()) == step.chunks[each.dp_rank]
