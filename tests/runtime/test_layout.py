"""A layout serves all rows of a plan once; what cannot be laid out is refused by its numbers, before anything runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from chunkplan import PlanConfig, build, load_plan
from chunkplan.cost.model import CostModel
from chunkplan.errors import DataError, UsageError
from chunkplan.layers import StagePlacement
from chunkplan.planfile.likeness import samples_of
from chunkplan.planfile.plan import Plan
from chunkplan_runtime.distributed.stages import split_layers
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import RankLayout, choose_layout
from chunkplan_runtime.models.model import new_model
from tests.support.analyses import write_analysis
from tests.support.plan_rows import changed_rows
from tests.support.shared_plans import given_blocks

Built = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def built(tmp_path_factory, random_sequences):
    """`build(cost, **settings)` -> (plan folder, analysis folder)."""

    def make(cost=None, **settings):
        folder = tmp_path_factory.mktemp("layout")
        write_analysis(folder / "analysis", random_sequences([9, 20, 3, 14]))
        config = PlanConfig(**{"chunk_size": 6, "k": 1, "global_batch": 4, "cp": "off", **settings})
        build(folder / "analysis", folder / "plan", config, cost=cost)
        return folder / "plan", folder / "analysis"

    return make


@pytest.mark.parametrize("plan_dp, pp, world_size", [(1, 1, 1), (8, 1, 4), (8, 2, 8), (6, 3, 9), (2, 4, 8), (4, 2, 2)])
def test_processes_serve_every_stage_of_every_rank_once(plan_dp, pp, world_size):
    plan = Plan(Path("plan"), {"config": {"pp": pp, "dp": plan_dp}})
    served = []
    for rank in range(world_size):
        layout = choose_layout(plan, world_size, rank)
        assert layout.world_size == world_size
        assert layout.process_of(layout.stage, layout.replica) == rank
        assert (layout.is_first, layout.is_last) == (layout.stage == 0, layout.stage == pp - 1)
        served += [(dp_rank, layout.stage) for dp_rank in layout.dp_ranks(plan_dp)]
    assert sorted(served) == [(dp_rank, stage) for dp_rank in range(plan_dp) for stage in range(pp)]


def test_replicas_of_a_stage_lie_side_by_side():
    layouts = [RankLayout(dp=3, pp=2, process=rank) for rank in range(6)]
    assert [(each.stage, each.replica) for each in layouts] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert layouts[0].describe(4) == "process 4 of 6 (stage 1 of pipeline 1)"
    assert RankLayout(dp=2, process=1).describe() == "process 1 of 2 (data parallel)"


@pytest.mark.parametrize(
    "plan_dp, pp, world_size, message, hint",
    [
        (4, 1, 3, "3 processes cannot share the plan's 4 data-parallel ranks evenly", "with 1 or 2 or 4 processes"),
        (4, 1, 8, "8 processes cannot share", "`chunkplan build --like plan --dp 8 --output plan-dp8`"),
        (1, 1, 2, "2 processes cannot share the plan's 1 data-parallel rank evenly", "with 1 process in all"),
        (2, 4, 1, "1 process cannot share the plan's 2 data-parallel ranks of 4 stages each", "with 4 or 8 processes"),
        (2, 4, 6, "6 processes cannot share", "--like plan --dp 3 --pp 2 --output plan-dp3-pp2`"),
        (
            2,
            2,
            1,
            "1 process cannot share",
            "--like plan --dp 1 --pp 1 --output plan-dp1-pp1` builds one of the same steps",
        ),
    ],
)
def test_processes_that_do_not_fit_are_refused(plan_dp, pp, world_size, message, hint):
    with pytest.raises(UsageError, match=message) as raised:
        choose_layout(Plan(Path("plan"), {"config": {"pp": pp, "dp": plan_dp}}), world_size, 0)
    assert hint in str(raised.value.hint)


def test_layers_are_split_evenly_with_fewer_on_the_last_stages():
    assert split_layers(7, 1) == [range(7)]
    assert split_layers(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert split_layers(4, 4) == [range(stage, stage + 1) for stage in range(4)]
    assert split_layers(4, 3, (1, 2, 1)) == [range(1), range(1, 3), range(3, 4)]


@pytest.mark.parametrize("given", [(2, 1), (4, 0), (5, -1), (4,), (1, 1, 2), ()])
def test_layers_that_are_not_those_of_the_model_are_refused(given):
    with pytest.raises(UsageError, match="the model has 4 layers, the plan 2 stages") as raised:
        split_layers(4, 2, given)
    assert "2 numbers from 1 that sum to 4" in str(raised.value.hint)


@pytest.mark.parametrize("given", [None, (1, 1, 1), (1, 1, 1, 0)])
def test_more_stages_than_layers_are_refused(given):
    with pytest.raises(UsageError, match="4 stages for 3 layers") as raised:
        split_layers(3, 4, given)
    assert "--pp 3" in str(raised.value.hint)


def test_more_virtual_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match="2 stages of 2 virtual stages for 3 layers") as raised:
        split_layers(3, 2, virtual_stages=2)
    assert "fewer --virtual-stages" in str(raised.value.hint)
    with pytest.raises(UsageError, match="--stage-layers is 2,2: the model has 4 layers, the plan 4 model stages"):
        split_layers(4, 2, (2, 2), 2)


@pytest.mark.parametrize(
    "placement, model_stages",
    [
        (StagePlacement(3), [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        (StagePlacement(3, True), [[0, 5, 6], [1, 4, 7], [2, 3, 8]]),
    ],
)
def test_virtual_stages_of_a_stage_are_model_stages(placement, model_stages):
    layouts = [RankLayout(2, 3, rank, placement) for rank in range(6)]
    assert [layout.model_stages() for layout in layouts[::2]] == model_stages
    assert [layout.model_stages() for layout in layouts[1::2]] == model_stages
    for layout in layouts:
        assert [layout.stage_of(each) for each in layout.model_stages()] == [layout.stage] * 3
        assert (layout.is_first, layout.is_last) == (layout.stage == 0, layout.stage == 2)
    assert RankLayout(pp=3, placement=StagePlacement(2, True)).is_last  # beside the first model stage


def test_a_plan_for_what_the_runtime_does_not_do_is_refused_by_name(built):
    plan, analysis = built(cost=CostModel(tp=2))
    what = r"the plan is for tensor parallelism \(tp 2\), which the runtime does not do"
    with pytest.raises(UsageError, match=what) as raised:
        open_plan(plan, analysis, pp=1)
    assert "build it with" in str(raised.value.hint)


@pytest.mark.parametrize("pp, message", [(1, "2 pipeline stages, one is there"), (4, "2 pipeline stages, 4 are there")])
def test_a_plan_for_other_stages_is_refused(built, pp, message):
    with pytest.raises(UsageError, match=message) as raised:
        open_plan(*built(pp=2), pp=pp)
    assert f"--pp {pp}" in str(raised.value.hint)


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2},
        {"schedule": "1f1b", "stage_layers": (10, 18)},
        pytest.param({"schedule": "interleaved", "virtual_stages": 3}, marks=pytest.mark.soak),
        pytest.param({"schedule": "zero-bubble-v", "tail_sharing": True}, marks=pytest.mark.soak),
        pytest.param({"dp": 2, "cp": 2}, marks=pytest.mark.soak),
    ],
)
def test_what_is_said_of_a_plan_for_stages_builds_one_for_a_single_process(built, command, settings):
    plan, analysis = built(pp=2, **settings)
    with pytest.raises(UsageError) as refused:
        open_plan(plan, analysis)
    [typed] = re.findall("`chunkplan (build .*?)`", refused.value.hint)
    words = shlex.split(typed)
    assert command(*words).code == 0
    like = open_plan(words[-1])
    assert samples_of(like[0].manifest) == samples_of(load_plan(plan).manifest)
    assert PlanStream(*like, vocab_size=97, max_positions=20).num_steps == 1


@pytest.mark.parametrize(
    "swapped, placement, refused",
    [
        ([(1, 0)], StagePlacement(2), "0 and 1"),
        ([(0, 0), (1, 0)], StagePlacement(2), "1 and 2"),
        ([(1, 1)], StagePlacement(2, True), "2 and 3"),
        ([(0, 0), (1, 0)], StagePlacement(2, True), None),
    ],
)
def test_model_stages_of_two_processes_that_exchange_chunks_in_different_orders_are_refused(
    built, swapped, placement, refused
):
    """What the last stage of a V hands to itself may be in any order. (stage, virtual stage) has two chunks swapped."""
    plan, analysis = built(pp=2, k=100, schedule="interleaved", virtual_stages=2)
    with changed_rows(plan / "schedule.parquet") as rows:
        for row in rows:
            for virtual_stage in (0, 1):
                if (row["stage"], virtual_stage) in swapped:
                    own = [each for each in row["actions"] if each["virtual_stage"] == virtual_stage]
                    first, second = [each for each in own if each["op"] == "forward"][:2]
                    first["chunk_id"], second["chunk_id"] = second["chunk_id"], first["chunk_id"]
    layout = RankLayout(pp=2, placement=placement)
    stream = PlanStream(*open_plan(plan, analysis, pp=2), vocab_size=97, max_positions=20, layout=layout)
    if refused is None:
        assert len(list(stream)) == 1
        return
    with pytest.raises(DataError, match=f"model stages {refused} exchange activations in different orders"):
        next(iter(stream))


@pytest.mark.parametrize("virtual_stage", [2, -1])
def test_a_virtual_stage_that_is_not_there_is_named(built, virtual_stage, tiny_config):
    plan, analysis = built(k=100)
    with changed_rows(plan / "schedule.parquet") as rows:
        rows[0]["actions"][0]["virtual_stage"] = virtual_stage
    model = new_model(AutoConfig.for_model(**tiny_config("qwen2")), torch.float32, seed=0)
    work = next(iter(PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=20)))
    with pytest.raises(DataError, match=f"on virtual stage {virtual_stage}, which does not exist"):
        RankExecutor(model).run(work.ranks[0], 1)


@pytest.mark.parametrize("op, what", [("forward", "activations"), ("backward", "gradients")])
def test_stages_that_exchange_chunks_in_different_orders_are_refused(built, op, what):
    plan, analysis = built(pp=3, k=100, dp=2)
    with changed_rows(plan / "schedule.parquet") as rows:
        (row,) = (row for row in rows if (row["step"], row["dp_rank"], row["stage"]) == (0, 1, 1))
        first, second = [action for action in row["actions"] if action["op"] == op][:2]
        first["chunk_id"], second["chunk_id"] = second["chunk_id"], first["chunk_id"]
    opened = open_plan(plan, analysis, pp=3)
    for rank in range(6):
        stream = PlanStream(*opened, vocab_size=97, max_positions=20, layout=RankLayout(dp=2, pp=3, process=rank))
        if rank % 2 == 0:
            assert len(list(stream)) == 1  # its pipeline is in order
            continue
        with pytest.raises(DataError, match=f"stages 0 and 1 exchange {what} in different orders") as raised:
            next(iter(stream))
        assert raised.value.where == "step 0, rank 1"


def test_every_process_has_the_actions_of_its_stage_and_ranks(built):
    plan, analysis = open_plan(*built(pp=2, dp=4), pp=2)
    step = next(plan.iter_steps())
    for layout in (replace(RankLayout(dp=2, pp=2), process=rank) for rank in range(4)):
        (work,) = PlanStream(plan, analysis, vocab_size=97, max_positions=20, layout=layout)
        assert [each.dp_rank for each in work.ranks] == list(layout.dp_ranks(4))
        for each in work.ranks:
            assert each.actions == step.actions[each.dp_rank, layout.stage]
            assert list(each.chunks.values()) == step.chunks[each.dp_rank]


@pytest.fixture
def shared(built):
    """A plan in which four ranks share two sequences of several chunks, and its analysis."""
    with given_blocks({20: (0, 4, 2), 14: (0, 4, 1)}):
        return built(cp="auto", dp=4, chunk_size=4)


def own_streams(shared):
    opened = open_plan(*shared)
    layouts = [RankLayout(dp=4, process=process) for process in range(4)]
    return [PlanStream(*opened, vocab_size=97, max_positions=20, layout=layout) for layout in layouts]


@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_ranks_that_share_sequences_are_each_on_a_process_of_their_own(shared, num_processes, command):
    """Also where nobody chose the layout; the command that is said builds a plan that fits."""
    plan, analysis = open_plan(*shared)
    with pytest.raises(UsageError, match=f"as many replicas as it has ranks, 4, not {num_processes}") as refused:
        choose_layout(plan, num_processes, 0)
    hint = str(refused.value.hint)
    assert "with 4 processes in all, or" in hint and "--resume to go on with a run of this one" in hint
    with pytest.raises(UsageError, match="as many replicas as it has ranks") as refused:
        PlanStream(plan, analysis, vocab_size=97, max_positions=20, layout=RankLayout(dp=num_processes))
    assert "for these: open that" in refused.value.hint and "--resume" not in refused.value.hint
    [typed] = re.findall("`chunkplan (build .*?)`", hint)
    words = shlex.split(typed)
    assert command(*words).code == 0
    like = load_plan(words[-1])
    assert like.config.dp == num_processes
    choose_layout(like, num_processes, 0)


def test_processes_know_alike_who_has_which_tokens(shared):
    """A shared chunk has the same number everywhere, and every token of it is one process's own."""
    works = [next(iter(stream)).ranks[0] for stream in own_streams(shared)]
    parts = [{number: each.shared for number, each in work.tensors.items() if each.shared} for work in works]
    assert parts[0].keys() == parts[1].keys() and len(parts[0]) == 3
    for number, part in parts[0].items():
        assert all(other[number].span == part.span for other in parts)
        tokens = [token for work in works for span in work.tensors[number].spans for token in range(*span[1:3])]
        assert sorted(tokens) == [*range(part.span.start, part.span.stop)]
        for work, other in zip(works, parts, strict=True):
            spans = work.tensors[number].spans
            own = other[number].slices[other[number].heads.index(work.dp_rank)]
            assert own == tuple((span.start, span.stop) for span in spans) or len(own) < len(spans)
            held = {token for run in other[number].runs for token in range(*run)}
            assert held == {token for slices in other[number].slices for run in slices for token in range(*run)}
            holding = other[number].holdings[other[number].place]
            before = [holding.before(token) for token in range(part.span.length + 1)]
            assert [token for token in range(part.span.length) if before[token] < before[token + 1]] == [
                token for run in holding.runs for token in range(*run)
            ]


def test_ranks_that_do_not_do_the_same_with_what_they_share_are_refused(shared):
    with changed_rows(shared[0] / "schedule.parquet") as rows:
        actions = rows[1]["actions"]
        actions[0], actions[1] = actions[1], actions[0]
    first, second, *_ = own_streams(shared)
    assert next(iter(first)).ranks
    with pytest.raises(DataError, match="ranks 0 and 1 do not do the same with the chunks that they share") as raised:
        next(iter(second))
    assert raised.value.where == "step 0"


def test_ranks_of_which_one_alone_keeps_attention_of_what_they_share_are_refused(shared):
    """It would send nothing in the recompute, in which the others attend again."""
    with changed_rows(shared[0] / "chunks.parquet") as rows:
        next(row for row in rows if row["dp_rank"] == 1 and row["cp_size"] > 1)["kept_attention"] = "gpu"
    first, second, *_ = own_streams(shared)
    assert next(iter(first)).ranks
    with pytest.raises(DataError, match="ranks 0 and 1 do not do the same with the chunks that they share"):
        next(iter(second))


def test_other_slices_than_a_rank_s_own_are_refused(shared):
    with changed_rows(shared[0] / "chunks.parquet") as rows:
        own, other = (next(row for row in rows if (row["dp_rank"], row["chunk_id"]) == (rank, 0)) for rank in (0, 1))
        own["segments"], other["segments"] = other["segments"], own["segments"]
    with pytest.raises(DataError, match="rank 0 has other slices of chunk 0 than are its own"):
        next(iter(own_streams(shared)[0]))
