"""The lower bound of a configuration: whatever is simulated takes as long at least, and as much memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.tuning.bound import fewest_bytes, step_bound_ns, work_of_steps
from chunkplan.tuning.options import LADDER, TuneOptions
from chunkplan.tuning.sampling import Sample, sample_steps
from chunkplan.tuning.trial import try_out
from tests.support.command_line import SMALL_MODEL
from tests.support.tuning_cases import long_tail, options_with


def sampled(tokens: np.ndarray, options: TuneOptions, config: PlanConfig) -> Sample:
    [layout] = options.layouts()
    return sample_steps(tokens, config, options.cost(layout, LADDER[0]), 3)


@settings(max_examples=25)
@given(data=st.data())
def test_no_simulation_takes_less_time_or_memory_than_the_bound(data: st.DataObject) -> None:
    """Of any lengths, model, layout, schedule, ChunkSize, K, level of checkpointing, offloading and sharding."""
    dp, pp = data.draw(st.sampled_from([(1, 1), (4, 1), (8, 1), (2, 2), (1, 4), (2, 4)]))
    model = {"shape": shape_of_config(SMALL_MODEL, "")} if data.draw(st.booleans()) else {}
    options = options_with(
        **model,
        tp=1,
        dp=dp,
        pp=pp,
        schedules=None,
        cp="auto",
        global_batch=8,
        lora_rank=data.draw(st.sampled_from([0, 16])),
    )
    [layout] = options.layouts()
    longest = data.draw(st.sampled_from([3_000, 40_000, 200_000]))
    tokens = long_tail(40, longest, data.draw(st.integers(0, 1000)))
    schedule, cp = data.draw(st.sampled_from(options.ways_of(layout)))
    chunk_size, k = data.draw(st.sampled_from([1024, 5000, 16384, 65536])), data.draw(st.sampled_from([1, 2, 8]))
    config = options.plan_config(layout, chunk_size, k, schedule, cp)
    cost = options.cost(
        layout, data.draw(st.sampled_from(LADDER)), data.draw(st.sampled_from(options.shardings_of(layout)))
    )
    sample = sampled(tokens, options, config)
    outcome = try_out(sample, config, cost)
    bound = step_bound_ns(work_of_steps(sample, cost.shape.attention_patterns), config, cost)
    assert 0 < bound <= outcome.step_ns * (1 + 1e-6)
    assert 0 < fewest_bytes(int(tokens.max()), config, cost) <= outcome.memory(cost).total


def test_on_one_gpu_the_bound_is_near_what_is_simulated() -> None:
    """There nothing waits: what is left is how well chunks are filled, and attention that is run again."""
    options = options_with(tp=1, pp=1, schedules=None)
    config = options.plan_config(options.layouts()[0], 8192, 4, "algorithm2")
    cost = options.cost(options.layouts()[0], LADDER[0])
    sample = sampled(long_tail(200), options, config)
    outcome = try_out(sample, config, cost)
    work = work_of_steps(sample, QWEN2_5_7B.attention_patterns)
    assert step_bound_ns(work, config, cost) == pytest.approx(outcome.step_ns, rel=0.05)
    again = replace(config, k=1)
    assert step_bound_ns(work, again, cost) > step_bound_ns(work, config, cost)
    assert step_bound_ns(work, config, replace(cost, checkpointing="full")) > 1.2 * outcome.step_ns
