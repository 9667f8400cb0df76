"""What waits for a device is refused while links are open, for which the host memory of a step is found beforehand."""

from __future__ import annotations

import ast
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig

from chunkplan_runtime.devices import new_host_memory, no_device_waits, pinned, synchronize
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.reserve import reserve_pages
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.models.model import new_model
from tests.support.places import ROOT

CPU = torch.device("cpu")
RUNTIME = ROOT / "runtime" / "chunkplan_runtime"

WAITS = {
    "waiting for the device": lambda: synchronize(CPU),
    "taking host memory": lambda: new_host_memory((2,), torch.float32, CPU),
    "pinning memory": lambda: pinned(torch.zeros(2)),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_for_the_device_is_refused_while_links_are_open_and_done_before_and_after(what):
    WAITS[what]()
    with pytest.raises(AssertionError, match=f"{what} while links are open"), no_device_waits():
        WAITS[what]()
    WAITS[what]()


def test_nothing_else_in_the_runtime_waits_for_the_device():
    """But calibration, which runs on one process, without links."""
    found = []
    for file in sorted(RUNTIME.rglob("*.py")):
        if file.parent.name == "calibration":
            continue
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            of_torch = ast.unparse(call.func).startswith("torch.")
            if name in ("synchronize", "pin_memory", "empty_cache") or (
                of_torch and any(keyword.arg == "pin_memory" for keyword in call.keywords)
            ):
                found.append(f"{file.name}: {name}")
    assert sorted(found) == ["devices.py: empty", "devices.py: pin_memory", "devices.py: synchronize"]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("window", [None, 7])
def test_a_step_takes_just_the_host_memory_that_it_is_found_to_need(
    window, k, evaluates, tiny_config, handmade_plan, random_sequences
):
    """Pages of several sizes, of two sequences and of layers that look back 7 tokens or all the way."""
    changes = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]} if window else {}
    config = AutoConfig.for_model(**tiny_config("gemma3_text" if window else "qwen2", **changes))
    model = new_model(config, torch.bfloat16, seed=1)
    long = [[(0, start, start + 2)] for start in range(0, 40, 2)]
    plan = handmade_plan(random_sequences([40, 5]), [{0: [*long, [(1, 0, 3)], [(1, 3, 5)]]}], k=k)
    [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256))).ranks
    executor = RankExecutor(model, kv_offload=True)
    with patch.object(HostMemory, "reserve"):  # so that it is taken when it is needed
        (executor.evaluate if evaluates else executor.run)(work, 1)
    memory = executor.memory
    assert isinstance(memory, HostMemory)
    taken = {kind: len(tensors) for kind, tensors in memory.unused.items() if tensors}
    assert len({shape[0] for shape, _ in taken}) > 1
    reserved = HostMemory(CPU)
    actions = [action for action in work.actions if not evaluates or action.op in ("forward", "forward_kv")]
    reserve_pages(reserved, [model], replace(work, actions=actions), 12, with_gradients=not evaluates)
    assert {kind: len(tensors) for kind, tensors in reserved.unused.items()} == taken
    assert {len(buffer.tensors[0]) for buffer in reserved._buffers} == {12}
    executor.memory = reserved
    with no_device_waits():
        (executor.evaluate if evaluates else executor.run)(work, 1)
