"""Copies between device and host run beside attention, a page ahead of it, and touch nothing that is in use.

A CPU does one thing after another; what streams and events allow is followed here, and what a GPU may do at once found.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from chunkplan_runtime.execution import executor
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.models.model import new_model
from tests.support.streams import FROM_HOST, KERNELS, TO_HOST, Streams, races

#: The operators that are attention to a page.
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")


@pytest.fixture
def record(tiny_config, handmade_plan, random_sequences, monkeypatch):
    """`record(model_type, checkpointing, kept)` -> a second step's operations, on five pages; the device's buffers."""

    def run(model_type, checkpointing="none", kept=None):
        changes = {"sliding_window": 30} if model_type == "gemma3_text" else {}
        config = AutoConfig.for_model(**tiny_config(model_type, num_hidden_layers=2, **changes))
        model = new_model(config, torch.float32, seed=1)
        model.set_checkpointing(checkpointing)
        monkeypatch.setattr(executor, "PAGE_CHUNKS", 2)
        chunks = [*[[(0, start, start + 8)] for start in range(0, 80, 8)], [(1, 0, 5), (2, 0, 6)]]
        plan = handmade_plan(random_sequences([80, 5, 6]), [{0: chunks}], k=2, kept=kept)
        [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256))).ranks
        runs = RankExecutor(model, kv_offload=True)
        with Streams(monkeypatch) as streams:
            for _ in range(2):
                runs.run(work, 30)
        assert isinstance(runs.memory, HostMemory)
        return streams.operations, runs.memory

    return run


HOW = [
    pytest.param("qwen3", "none", None, marks=pytest.mark.soak),  # less than the next but one
    ("qwen3", "offload", None),
    ("qwen3", "none", {0: "host", 1: "host", 2: "gpu", 3: "host"}),
    pytest.param("gemma3_text", "full", None, marks=pytest.mark.soak),
    pytest.param("falcon_h1", "none", None, marks=pytest.mark.soak),  # states, whose scan is slow here
]


@pytest.mark.parametrize(("model_type", "checkpointing", "kept"), HOW)
def test_what_streams_do_at_once_touches_nothing_in_common(record, model_type, checkpointing, kept):
    operations, _ = record(model_type, checkpointing, kept)
    assert {each.name for each in operations if each.stream != KERNELS} == {"copy_"}
    assert races(operations) == []


def test_every_copy_of_a_page_has_attention_to_another_one_to_run_beside(record):
    """From when a fetch may begin until who needs it; from when gradients may leave until who waits for that.

    Fetches are asked for before that attention is, so that a host that is not ahead is no hindrance: all but those of
    the block that a layer's attention begins with.
    """
    operations, memory = record("qwen3")
    kernels = [each for each in operations if each.stream == KERNELS]
    attention = [each.number for each in kernels if each.name in ATTENTION]
    gradients = [_range(each) for buffer in memory._buffers for each in buffer.gradients]
    buffers = gradients + [_range(each) for buffer in memory._buffers for each in buffer.tensors]
    beside = {FROM_HOST: [], TO_HOST: []}
    late, num_asked, num_written = set(), 0, 0
    for each in operations:
        num_asked += each.stream == KERNELS
        if _touch(each.writes, buffers) or _touch(each.reads, gradients):
            if each.stream != KERNELS:
                waits = (one.number for one in kernels if one.done[each.stream] >= each.number)
                ends = next(waits, kernels[-1].number + 1)
                beside[each.stream].append(sum(each.done[KERNELS] < number < ends for number in attention))
                if each.stream == FROM_HOST and not any(num_asked < number < ends for number in attention):
                    late.add(ends)
        elif each.stream == TO_HOST:
            num_written += 1
    assert all(len(found) > 100 and min(found) >= 1 for found in beside.values())
    # A forward writes a key and a value for each layer; each of ten parts goes backward through two, in two steps.
    assert len(late) <= num_written / 2 + 10 * 2 * 2


def _range(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _touch(ranges, others):
    return any(start < end and begin < stop for start, stop in ranges for begin, end in others)
