"""What the host does for a layer of a chunk, beside transformers' own layer: calls of Python functions, operators."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.products import SummedWeight
from chunkplan_runtime.training.optimizer import TrainedWeights

#: Lengths of sequences, chunks, the one that is looked at, and how many calls more its layers may take than those of
#: transformers, forward and backward.
CASES = {
    "one whole sequence": ([8], [[(0, 0, 8)]], 0, {"forward": 20, "backward": 16}),
    "two whole sequences": ([5, 3], [[(0, 0, 5), (1, 0, 3)]], 0, {"forward": 25, "backward": 26}),
    "a part with a prefix": ([24], [[(0, i, i + 8)] for i in (0, 8, 16)], 1, {"forward": 72, "backward": 73}),
}


@contextmanager
def counting(found, name):
    """Count calls of Python functions within the block."""

    def note(frame, event, argument):
        found[name] += event == "call"

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


class Dispatched(TorchDispatchMode):
    """Within the block operators are counted."""

    def __init__(self, found, name):
        super().__init__()
        self.found, self.name = found, name

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[self.name] += 1
        return function(*args, **(kwargs or {}))


def ours(config, work, chunk_id, counting=counting, dtype=torch.float32):
    model, found = new_model(copy.deepcopy(config), dtype, 0), Counter[str]()
    TrainedWeights(model.model, master_weights=True)

    @contextmanager
    def around(action):
        with counting(found if action.chunk_id == chunk_id else Counter(), action.op):
            yield

    for _ in range(2):  # what is done once is done
        found.clear()
        RankExecutor(model).run(work, 1, around)
    return found


def theirs(config, work, chunk_id, counting=counting, dtype=torch.float32):
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").train().to(dtype)
    tensors, found = work.tensors[chunk_id], Counter[str]()
    for _ in range(2):
        found.clear()
        with counting(found, "forward"):
            hidden = model.model(
                input_ids=tensors.input_ids, position_ids=tensors.position_ids.long(), use_cache=False
            ).last_hidden_state
        with counting(found, "backward"):
            hidden.sum().backward()
    return found


def of_a_layer(count, config, *given):
    """What two more layers take, halved."""
    counts = []
    for num_layers in (2, 4):
        changes = {"num_hidden_layers": num_layers, "layer_types": None}
        counts.append(count(type(config)(**{**config.to_dict(), **changes}), *given))
    few, many = counts
    return {op: (many[op] - few[op]) // 2 for op in ("forward", "backward")}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_takes_few_more_calls_of_python_than_that_of_transformers(
    tiny_config, handmade_plan, random_sequences, case
):
    lengths, chunks, chunk_id, more = CASES[case]
    config = AutoConfig.for_model(**tiny_config("qwen2"))
    work = work_of(handmade_plan(random_sequences(lengths), [{0: chunks}], k=len(chunks)))
    own = of_a_layer(ours, config, work, chunk_id)
    others = of_a_layer(theirs, config, work, chunk_id)
    assert {op: own[op] - others[op] <= more[op] for op in more} == dict.fromkeys(more, True), (own, others)


def work_of(plan):
    """The one rank of the one step of a plan."""
    [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256))).ranks
    return work


#: How many operators more a layer may take than that of transformers, forward and backward: in float32; in bfloat16
#: with fp32 master weights, to which its gradients are added; and where that is done in products, as on a GPU.
OPERATORS = {
    "one whole sequence": {"float32": (-1, -2), "bfloat16": (-1, 25), "in products": (-1, 1)},
    "two whole sequences": {"float32": (-5, 2), "bfloat16": (-5, 28), "in products": (-5, 4)},
    "a part with a prefix": {"float32": (18, 22), "bfloat16": (18, 60), "in products": (18, 36)},
}


@pytest.mark.parametrize("how", ["float32", "bfloat16", "in products"])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_dispatches_few_more_operators_than_that_of_transformers(
    tiny_config, handmade_plan, random_sequences, case, how, monkeypatch
):
    if how == "in products":
        monkeypatch.setattr(SummedWeight, "devices", frozenset({"cpu"}))
    dtype = torch.float32 if how == "float32" else torch.bfloat16
    lengths, chunks, chunk_id, _ = CASES[case]
    config = AutoConfig.for_model(**tiny_config("qwen2"))
    work = work_of(handmade_plan(random_sequences(lengths), [{0: chunks}], k=len(chunks)))
    own, others = (of_a_layer(each, config, work, chunk_id, Dispatched, dtype) for each in (ours, theirs))
    more = dict(zip(("forward", "backward"), OPERATORS[case][how], strict=True))
    assert {op: own[op] - others[op] <= more[op] for op in more} == dict.fromkeys(more, True), (own, others)
