"""Context-parallel groups: which ranks share which sequence, what each holds of it, and how long that takes."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.arrays import sum_runs
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import attention_pairs_of, work_ns
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.model import CostModel
from chunkplan.errors import UsageError
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.chunks import ChunkedBlock, slice_of
from chunkplan.planning.method import Dataset, chunk_block, schedule_block
from chunkplan.planning.sharing import SharingProblem, choose_groups, share_sequences
from chunkplan.planning.splitting import cut_sequences
from tests.support.plain import PLAIN, plain_cost

COST = plain_cost()


def chunked(lengths: list[int], cost: CostModel = COST, **options: object) -> tuple[ChunkedBlock, PlanConfig]:
    """The chunks of one step of sequences of `lengths`, which ranks may share unless `options` say otherwise."""
    config = PlanConfig(**{"chunk_size": 1024, "k": 2, "dp": 4, "cp": "auto", **options})
    tokens = np.array(lengths, np.int32)
    order = np.argsort(-tokens, kind="stable").astype(np.int32)
    block = StepBlock(0, 0, order, np.array([tokens.size]))
    return chunk_block(block, Dataset(tokens, tokens - 1, None), config, cost), config


def slowest_ns(block: ChunkedBlock, dp: int) -> int:
    return int(sum_runs(block.cost_ns, block.chunks.rank_chunks).reshape(-1, dp).max())


def test_a_sequence_that_outweighs_a_rank_is_shared_and_the_slowest_rank_is_done_several_times_sooner() -> None:
    lengths = [200_000, *[900] * 40]
    shared, _ = chunked(lengths, chunk_size=8192, dp=8)
    alone, _ = chunked(lengths, chunk_size=8192, dp=8, cp="off")
    assert shared.sequences.cp_size[0] == 8 and (shared.sequences.cp_size[1:] == 1).all()
    assert slowest_ns(alone, 8) > 6 * slowest_ns(shared, 8)


def test_what_ranks_even_out_by_themselves_is_not_shared() -> None:
    block, _ = chunked([900] * 64)
    assert (block.sequences.cp_size == 1).all()


def test_two_sequences_for_three_ranks_are_shared_by_all() -> None:
    """Whole sequences cannot be even, however they are assigned."""
    block, _ = chunked([60_000, 60_000], dp=3)
    assert block.sequences.cp_size.tolist() == [3, 3]


def test_at_most_n_ranks_share_a_sequence() -> None:
    assert chunked([300_000, *[900] * 8], dp=8, cp=2)[0].sequences.cp_size[0] == 2
    assert chunked([300_000, *[900] * 8], dp=8, cp=4)[0].sequences.cp_size[0] == 4


@pytest.mark.parametrize(
    ("dp", "cp", "sizes"),
    [
        (8, "auto", (1, 2, 4, 8)),
        (8, 4, (1, 2, 4)),
        (12, "auto", (1, 2, 4, 12)),
        (12, 6, (1, 2, 6)),
        (7, "auto", (1, 7)),
        (1, "auto", (1,)),
        (8, "off", (1,)),
    ],
)
def test_sizes_of_groups_divide_one_another(dp: int, cp: str | int, sizes: tuple[int, ...]) -> None:
    assert PlanConfig(chunk_size=8, k=1, dp=dp, cp=cp).cp_sizes == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 8, "cp": 3}, "cp is 3, expected a divisor of dp, which is 8"),
        ({"dp": 8, "cp": 1}, "--cp is 1, expected auto, off, or a whole number from 2"),
        ({"dp": 8, "cp": "all"}, "--cp is 'all', expected auto, off, or a whole number from 2"),
        ({"dp": 2, "pp": 2, "cp": "auto", "schedule": "search"}, "orders every rank by itself"),
        ({"dp": 2, "cp": "auto", "balance": "search"}, "balance search assigns whole sequences"),
    ],
)
def test_groups_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanConfig(chunk_size=8, k=1, **options)


@given(tokens=st.integers(1, 3000), heads=st.sampled_from([1, 2, 3, 4]), groups=st.sampled_from([1, 2, 3, 4, 8]))
def test_slices_cover_a_chunk_once_and_are_even(tokens: int, heads: int, groups: int) -> None:
    size = heads * groups
    tokens += 2 * size
    halves = 1 if groups == 1 else 2
    found = [[slice_of(tokens, size, heads, member, half) for half in range(halves)] for member in range(size)]
    edges = sorted(edge for own in found for edge in own)
    assert edges[0][0] == 0 and edges[-1][1] == tokens
    assert all(end == start for (_, end), (start, _) in pairwise(edges))
    assert all(end > start for start, end in edges), "no slice is empty"
    sizes = [sum(end - start for start, end in own) for own in found]
    assert max(sizes) - min(sizes) <= 2 * halves


def test_the_slices_of_zigzag_attend_to_equally_much() -> None:
    """Under a causal mask, and whatever comes before the chunk."""
    tokens, prefix, groups = 4096, 10_000, 4
    halves = [[slice_of(tokens, groups, 1, member, half) for half in (0, 1)] for member in range(groups)]
    pairs = [sum(sum(prefix + position + 1 for position in range(start, end)) for start, end in own) for own in halves]
    assert max(pairs) == pytest.approx(min(pairs), rel=1e-3)


def best_by_enumeration(times: np.ndarray, sizes: np.ndarray, dp: int) -> int:
    """The best of all ways to choose a size and a block for every sequence, found by CP-SAT and proved."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    slowest = model.new_int_var(0, int(times[0].sum()), "slowest")
    placed = {
        (job, index, first): model.new_bool_var("")
        for job, index in product(range(times.shape[1]), range(sizes.size))
        for first in range(0, dp, int(sizes[index]))
    }
    for job in range(times.shape[1]):
        model.add_exactly_one(var for (other, _, _), var in placed.items() if other == job)
    for rank in range(dp):
        own = [(key, var) for key, var in placed.items() if key[2] <= rank < key[2] + sizes[key[1]]]
        model.add(sum(int(times[index, job]) * var for (job, index, _), var in own) <= slowest)
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # what it leaves behind would end this process at the next interrupt
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 20
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)


@pytest.mark.soak
@pytest.mark.parametrize("dp", [4, 8])
def test_groups_of_small_steps_are_within_one_per_cent_of_the_best_on_average(dp: int) -> None:
    rng = np.random.default_rng(dp)
    sizes = np.array([size for size in (1, 2, 4, 8) if size <= dp])
    gaps = []
    for _ in range(16):
        lengths = np.sort((10 ** rng.uniform(3, 5.5, 10)).astype(np.int64))[::-1]
        config = PlanConfig(chunk_size=8192, k=4, dp=dp, cp="auto")
        work = work_ns(COST, lengths, attention_pairs_of(lengths, 0 * lengths))
        whole, single = cut_sequences(lengths, work, config, COST), work // 1_000_000
        assert whole.tokens.size == single.size
        # A share costs a few per cent more than its part, as exchanges and chunks do.
        times = np.stack([single * (100 + 4 * (size > 1)) // (100 * size) + 20 * (size > 1) for size in sizes])
        bound = max(int((times * sizes[:, None]).min(axis=0).sum()) // dp, int(times.min(axis=0).max()))
        chosen, first = np.zeros(lengths.size, np.int64), np.zeros(lengths.size, np.int64)
        none = np.zeros(lengths.size, bool)
        choose_groups(SharingProblem(times, none, sizes, 0, 1, 0, bound, dp), chosen, first)
        loads = np.zeros(dp, np.int64)
        for job, index in enumerate(chosen):
            if index > 0:
                loads[first[job] : first[job] + sizes[index]] += times[index, job]
        for job in np.flatnonzero(chosen == 0):
            loads[loads.argmin()] += times[0, job]
        best = best_by_enumeration(times, sizes, dp)
        assert loads.max() >= best >= bound
        gaps.append(loads.max() / best - 1)
    assert np.mean(gaps) <= 0.01


def test_groups_that_come_in_two_sizes_alone_are_found_where_the_bound_is_far() -> None:
    """Six ranks are shared by 1, 2 or 6; a choice of two alone must not be better."""
    times = {cp: slowest_ns(chunked([330, 1035, 393, 870], chunk_size=255, k=16, dp=6, cp=cp)[0], 6) for cp in (2, 6)}
    assert times[6] <= times[2]


def test_small_steps_are_near_their_bound_although_chunks_cost_the_same_however_full_they_are() -> None:
    """What ranks share leaves them with less for their other chunks, each of which costs as much as a full one."""
    rng = np.random.default_rng(0)
    steps = [np.clip(rng.lognormal(5, 1.1, 64), 8, 40_000).astype(int).tolist() for _ in range(40)]
    slowest = bound = 0
    for step in steps:
        block, _ = chunked(step, dp=16, chunk_size=8192)
        assert block.bound_ns is not None
        slowest, bound = slowest + slowest_ns(block, 16), bound + int(block.bound_ns.sum())
    assert slowest <= 1.08 * bound


LENGTHS = st.lists(st.integers(1, 20_000), min_size=1, max_size=24)
HOW = st.fixed_dictionaries(
    {
        "chunk_size": st.sampled_from([64, 1000, 1024]),
        "k": st.integers(1, 4),
        "dp": st.sampled_from([1, 2, 3, 4, 6, 7, 8]),
        "split": st.sampled_from(["full", "even", "cost"]),
        "tail_sharing": st.booleans(),
        "equal_chunks": st.booleans(),
    }
)


@settings(deadline=None)
@given(LENGTHS, HOW, st.sampled_from([(1, "algorithm2"), (2, "1f1b"), (3, "auto"), (2, "zero-bubble")]))
def test_no_rank_waits_for_ever_and_none_is_done_before_the_bound(
    lengths: list[int], how: dict[str, object], pipeline: tuple[int, str]
) -> None:
    pp, schedule = pipeline
    block, config = chunked(lengths, **how, pp=pp, schedule=schedule)
    assert (block.bound_ns is None) == (config.dp == 1)
    step = StepBlock(0, 0, np.arange(len(lengths), dtype=np.int32), np.array([len(lengths)]))
    ends = schedule_block(step, block, config, COST).stage_end
    assert ends.min() >= 0
    assert block.bound_ns is None or ends.max() >= int(block.bound_ns[0]) // pp * (1 - 1e-6)


@settings(deadline=None)
@given(LENGTHS, HOW)
def test_ranks_of_a_group_hold_all_of_a_sequence_once_and_have_it_at_the_same_place(
    lengths: list[int], how: dict[str, object]
) -> None:
    block, config = chunked(lengths, **how)
    chunks = block.chunks
    held = [np.zeros(length, np.int64) for length in lengths]
    for segment in range(chunks.sequence_id.size):
        held[chunks.sequence_id[segment]][chunks.start[segment] : chunks.end[segment]] += 1
    assert all((counts == 1).all() for counts in held)
    assert chunks.num_tokens.max() <= config.chunk_size
    assert chunks.num_target_tokens.sum() == sum(lengths) - len(lengths)
    rank = np.repeat(np.arange(config.dp), np.diff(chunks.rank_chunks))
    place = np.arange(rank.size) - chunks.rank_chunks[rank]
    for group in np.unique(chunks.group_id[chunks.cp_size > 1]):
        rows = np.flatnonzero(chunks.group_id == group)
        first, size = chunks.cp_first_rank[rows[0]], chunks.cp_size[rows[0]]
        assert np.unique(rank[rows]).tolist() == list(range(first, first + size)) and first % size == 0
        for index in range(chunks.group_size[rows[0]]):
            same = rows[chunks.group_index[rows] == index]
            assert np.unique(place[same]).size == 1 and same.size == size
            assert chunks.num_tokens[same].sum() == chunks.cp_tokens[same[0]]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_is_chosen_by_is_what_chunks_then_take(size: int) -> None:
    """But for the rounding of slices to whole tokens."""
    block, config = chunked([300_000], chunk_size=8192, k=3, dp=size)
    assert block.sequences.cp_size[0] == size
    times = sum_runs(block.cost_ns, block.chunks.rank_chunks)
    np.testing.assert_allclose(times, block.sequences.work[0], rtol=1e-3)
    alone = cut_sequences(np.array([300_000]), block.necessary_ns, config, COST)
    shares, _ = share_sequences(np.array([0, 1]), alone, block.necessary_ns, config, COST)
    assert shares.work[0] == block.sequences.work[0]


def exchange(tokens: int, prefix: int, size: int, heads: int, cost: CostModel = COST) -> tuple[float, float]:
    """Nanoseconds of a layer's forward and backward."""
    numbers = (np.array([value]) for value in (tokens, prefix, 1 + prefix // 8192, size, heads))
    found = exchange_times(cost, *numbers)
    return float(found.forward[0]), float(found.with_again(cost.rates.again)[0])


def test_an_exchange_by_heads_does_not_grow_with_the_prefix_and_one_by_pages_does() -> None:
    assert exchange(8192, 0, 4, 4) == exchange(8192, 262_144, 4, 4)
    slow = plain_cost(hardware=PLAIN, tp=1)
    near, far = exchange(2048, 8192, 16, 1, slow), exchange(2048, 262_144, 16, 1, slow)
    assert far[0] > near[0] and far[1] > near[1]


def test_the_bytes_of_an_exchange_by_heads_are_those_of_queries_keys_values_and_output() -> None:
    """Qwen2.5-7B, 4 ranks in a node, 2,048 tokens each: 3/4 of (2 x 3584 + 2 x 512) numbers of 2 bytes a token."""
    forward, backward = exchange(8192, 0, 4, 4)
    sent = 2048 * (2 * 3584 + 2 * 512) * 2 * 3 / 4
    assert forward == pytest.approx(1e9 * sent / COST.hardware.gpu_link_bytes + 2 * COST.hardware.link_ns)
    assert backward == forward


def test_pages_hide_behind_attention_where_it_takes_longer() -> None:
    """Two ranks in a node: attention to a long prefix by a chunk of 16K tokens takes longer than fetching it."""
    assert exchange(16_384, 262_144, 2, 1) == (COST.hardware.link_ns, COST.hardware.link_ns)


def test_where_layers_are_recomputed_in_the_backward_so_is_their_exchange() -> None:
    none, full = (exchange(8192, 0, 4, 4, plain_cost(checkpointing=kind)) for kind in ("none", "full"))
    assert full == (none[0], 2 * none[1])
