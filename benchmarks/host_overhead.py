"""What the host takes for a layer: a chunk through the executor, beside the same tokens through transformers' layers.

    python benchmarks/host_overhead.py    # 6 minutes, on one core

Layers are so narrow that next to nothing is computed: the time is that of Python, of torch's dispatch and of autograd.
It is that of the one thread there is, so that whatever else the machine does counts as little as can be. Both take
turns; transformers' layers see no prefix and, of several sequences, one mask. Their gradients are in the dtype of the
weights; those of chunks are added to fp32 master weights where weights are in bfloat16, in products too, as on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from machine import machine
from runtime_batch import Batch, make_batch, qwen2
from transformers import AutoModelForCausalLM

from chunkplan.planfile.plan import Action
from chunkplan_runtime.devices import wide
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.loss import cross_entropy
from chunkplan_runtime.models.model import CausalLM, Head, new_model
from chunkplan_runtime.models.products import SummedWeight
from chunkplan_runtime.training.optimizer import TrainedWeights

WIDTH, LAYERS, VOCABULARY = 64, 28, 128

#: Lengths of sequences, ChunkSize, which chunk is timed, and the largest ratio that is aimed at.
CASES = {
    "one whole sequence of 16": ([16], 16, 0, 1.2),
    "four whole sequences of 16": ([16] * 4, 64, 0, 1.2),
    "a part of 16 behind one": ([48], 16, 1, 1.6),
    "a part of 16 behind seven": ([144], 16, 7, 1.6),
}

#: Of weights, their dtype and where gradients of matrices are added to master weights by the products that make them.
WEIGHTS = {
    "float32": (torch.float32, ()),
    "bfloat16": (torch.bfloat16, ()),
    "bfloat16, sums in products": (torch.bfloat16, ("cpu",)),
}


def main() -> None:
    """Measure, and print each row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine("torch", "transformers"))
    print("| weights | chunk | | transformers, us a layer | chunkplan | ratio | of the fastest | at most |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for weights, (dtype, devices) in WEIGHTS.items():
        measure(weights, dtype, frozenset(devices), rounds)


def measure(weights: str, dtype: torch.dtype, devices: frozenset[str], rounds: int) -> None:
    """Measure all cases with weights of a dtype. `devices`: where sums are made in products."""
    SummedWeight.devices = devices
    config = qwen2(WIDTH, LAYERS, VOCABULARY, 1024, num_attention_heads=4, num_key_value_heads=2)
    model = new_model(config, dtype, 0)
    TrainedWeights(model.model, master_weights=True)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").train().to(dtype)
    for name, (lengths, chunk_size, chunk_id, goal) in CASES.items():
        batch = make_batch(lengths, chunk_size, len(lengths) + 100, VOCABULARY)
        ways = partial(transformers_seconds, theirs), partial(chunkplan_seconds, model)
        found = [[way(batch, chunk_id) for way in ways] for _ in range(rounds + 1)][1:]
        for op in ("forward", "backward"):
            pairs = [(other[op] / LAYERS * 1e6, own[op] / LAYERS * 1e6) for other, own in found]
            others, own = (median(times) for times in zip(*pairs, strict=True))
            least, fastest = (min(times) for times in zip(*pairs, strict=True))
            ratio = f"{own / others:.2f} | {fastest / least:.2f} | {goal}"
            print(f"| {weights} | {name} | {op} | {others:.0f} | {own:.0f} | {ratio} |", flush=True)


def chunkplan_seconds(model: CausalLM, batch: Batch, chunk_id: int) -> dict[str, float]:
    """Run a step in chunks; the seconds of the forward and the backward of one of them."""
    found: dict[str, float] = {}

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        started = time.thread_time()
        yield
        if action.chunk_id == chunk_id:
            found[action.op] = time.thread_time() - started

    RankExecutor(model).run(batch.work.ranks[0], batch.work.step.num_target_tokens, around)
    return found


def transformers_seconds(model: Any, batch: Batch, chunk_id: int) -> dict[str, float]:
    """Run the tokens of that chunk forward and backward as transformers does; the seconds of both.

    The loss is computed as that of chunks is.
    """
    tensors = batch.work.ranks[0].tensors[chunk_id]
    given = {"input_ids": tensors.input_ids, "position_ids": tensors.position_ids.long(), "use_cache": False}
    started = time.thread_time()
    hidden = model.model(**given).last_hidden_state[0]
    middle = time.thread_time()
    scale = 1 / batch.work.step.num_target_tokens
    weights = hidden.new_full((len(hidden),), scale, dtype=wide(hidden.dtype))
    _, gradient = cross_entropy()(Head(model.lm_head, VOCABULARY), hidden, tensors.labels, weights)
    torch.autograd.backward(hidden, gradient)
    return {"forward": middle - started, "backward": time.thread_time() - middle}


if __name__ == "__main__":
    main()
