"""Whatever the model, the plan and how chunks are run: gradients are those of whole sequences."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from chunkplan import PlanConfig, build
from chunkplan_runtime.attention.context import CurrentChunk
from chunkplan_runtime.distributed.stages import cut_stage
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.models.trained import add_lora
from chunkplan_runtime.parity import run_whole, write_random_analysis
from chunkplan_runtime.proof.prove import (
    TOLERANCE,
    relative_errors,
    spread_weights,
    take_gradients,
    vanishing_gradients,
)
from tests.support.kept_attention import keeping_attention

#: By what crosses a border of chunks: keys and values, windows of them, latents, tiles, states of every kind.
MODELS = {
    "llama": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "llama4_text": {"num_hidden_layers": 4},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6},
    "qwen3_next": {},
    "mamba2": {},
    "jamba": {},
    "minimax": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
}


#: Those without experts.
DENSE = ("llama", "gemma4_text", "mamba2", "lfm2")


class Case(NamedTuple):
    """A step: its sequences, how they are cut, and how chunks of them are run."""

    lengths: tuple[int, ...]
    chunk_size: int
    k: int
    pp: int
    kv_offload: bool
    checkpointing: bool
    lora: bool
    keep_attention: bool


CASES = st.builds(
    Case,
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=5).map(tuple),
    chunk_size=st.integers(3, 24),
    k=st.integers(1, 4),
    pp=st.integers(1, 2),
    kv_offload=st.booleans(),
    checkpointing=st.booleans(),
    lora=st.booleans(),
    keep_attention=st.booleans(),
)


class ThreadLinks:
    """Links between two stages that run in two threads of one process."""

    def __init__(self, queues):
        self._queues = queues

    @contextmanager
    def open(self, *_):
        yield

    def send(self, name, virtual_stage, chunk_id, tensor):
        self._queues[name].put(tensor)

    def receive(self, name, *_):
        tensor = self._queues[name].get()
        if tensor is None:
            raise RuntimeError("the other stage failed")
        return tensor

    def close(self):
        for queue in self._queues.values():
            queue.put(None)


@cache
def config_of(model_type):
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    return AutoConfig.for_model(**tiny_document(config.to_dict()))


def run_case(model_type, case, folder):
    """The worst relative error of a gradient."""
    model = new_model(config_of(model_type), torch.float64, seed=1)
    model.model.double()
    if case.lora:
        model = add_lora(model, rank=2, alpha=4)
    spread_weights(model.model)
    (folder / "analysis").mkdir()
    analysis = write_random_analysis(folder / "analysis", case.lengths, model.vocab_size, seed=0)
    build(
        analysis,
        folder / "plan",
        PlanConfig(chunk_size=case.chunk_size, k=case.k, pp=case.pp, global_batch=len(case.lengths)),
    )
    with evaluate_in_float64(model.model):
        run_whole(model, analysis, range(len(case.lengths)))
        whole = take_gradients(model)
    gradients = {}
    for own in run_stages(model, case, folder):
        for name, gradient in take_gradients(own).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return max(relative_errors(gradients, whole, vanishing_gradients(whole)).values())


def run_stages(model, case, folder):
    """Run the step on as many stages as it has, each in a thread."""
    queues = {"inputs": SimpleQueue(), "gradients": SimpleQueue()}
    half = len(model.own_layers) // 2
    stages = [model]
    if case.pp == 2:
        cuts = (range(half), range(half, len(model.own_layers)))
        copies = [replace(model, model=deepcopy(model.model), current=CurrentChunk()) for _ in cuts]
        stages = [cut_stage(own, cuts, RankLayout(pp=2, process=rank)) for rank, own in enumerate(copies)]
    failed = []

    def run(stage):
        own, links = stages[stage], ThreadLinks(queues)
        plan, analysis = open_plan(folder / "plan", folder / "analysis", pp=case.pp)
        layout = RankLayout(pp=case.pp, process=stage)
        stream = PlanStream(plan, analysis, vocab_size=own.vocab_size, max_positions=None, layout=layout, prefetch=0)
        try:
            if case.checkpointing:
                own.set_checkpointing("full")
            with evaluate_in_float64(own.model):
                executor = RankExecutor(own, kv_offload=case.kv_offload, links=links if case.pp > 1 else None)
                for work in stream:
                    for rank in work.ranks:
                        own_work = keeping_attention(rank) if case.keep_attention else rank
                        executor.run(own_work, work.step.num_target_tokens)
        except BaseException as error:
            failed.append(error)
            links.close()

    threads = [Thread(target=run, args=(stage,)) for stage in range(case.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return stages


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each == "lfm2" else pytest.mark.soak) for each in MODELS]
)
@given(case=CASES)
@settings(max_examples=8)
def test_any_step_is_exact(model_type, case):
    # Stages are threads here, and adapters of experts use a cache that all threads of a process have in common.
    assume(not (case.lora and case.pp == 2) or model_type in DENSE)
    with tempfile.TemporaryDirectory() as folder:
        assert run_case(model_type, case, Path(folder)) <= TOLERANCE
