"""In a chunk's forward and backward the host asks a device for nothing, and pages lie where those of a step before did.

A GPU would have done all that it was given before it could answer, and have nothing to do until the host goes on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from transformers import AutoConfig

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model
from tests.support.host_waits import NoHostWaits, RefusedError

WINDOW = {"sliding_window": 7}
EXPERTS = {"num_experts_per_tok": 2, "pad_token_id": 0}

MODELS = {
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gpt_oss": WINDOW | EXPERTS | {"num_local_experts": 4},
    "llama": {},
    "mistral": WINDOW,
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "qwen2": WINDOW | {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
    "qwen2_moe": EXPERTS | {"num_experts": 4},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "smollm3": {"pad_token_id": 0},
}


@pytest.fixture
def make_step(tiny_config, handmade_plan, random_sequences):
    """`make(model_type, k=1, **executor)` -> the executor of a model, and the work of a step with split sequences."""

    def make(model_type, k=1, kept=None, **how):
        config = AutoConfig.for_model(**tiny_config(model_type, **MODELS[model_type]))
        model = new_model(config, torch.float32, seed=1)
        model.set_checkpointing(how.pop("checkpointing", "none"))
        chunks = [*[[(0, start, start + 8)] for start in range(0, 40, 8)], [(1, 0, 5), (2, 0, 6)]]
        plan = handmade_plan(random_sequences([40, 5, 6]), [{0: chunks}], k=k, kept=kept)
        [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256))).ranks
        return RankExecutor(model, **how), work

    return make


def strict(work, steady=()):
    """Enters the mode around each action; the labels of chunks lie on the host."""
    return lambda action: NoHostWaits([each.labels for each in work.tensors.values()], steady)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=() if each in ("gemma2", "gpt_oss", "qwen2", "qwen3_moe") else pytest.mark.soak)
        for each in MODELS
    ],
)
def test_the_host_waits_for_nothing_in_forwards_and_backwards(model_type, make_step):
    executor, work = make_step(model_type)
    executor.run(work, 30, strict(work))


@pytest.mark.parametrize(
    "how",
    [
        {"kv_offload": True},
        {"checkpointing": "full"},
        {"checkpointing": "keep-attention"},
        {"checkpointing": "offload"},
        {"k": 2},
        {"kept": {0: "host", 1: "gpu", 2: "host"}},
    ],
)
def test_nor_with_pages_on_the_host_recomputed_layers_or_chunks_that_are_kept(how, make_step):
    executor, work = make_step("qwen3", **how)
    executor.run(work, 30, strict(work))


def test_pages_and_buffers_of_a_step_are_those_of_the_step_before(make_step):
    """Even in the first step none is taken in a chunk: all are there before."""
    executor, work = make_step("qwen3", kv_offload=True)
    for _ in range(2):
        executor.run(work, 30, strict(work, steady=["devices.py", "host_memory.py"]))


def test_inputs_of_layers_lie_where_those_of_the_step_before_did(make_step):
    """Even in the first step none is taken in a chunk: it is there before."""
    executor, work = make_step("qwen3", checkpointing="offload", k=2)
    executor.run(work, 30, strict(work, steady=["devices.py"]))
    taken = executor.model.current.host_inputs.num_bytes
    executor.run(work, 30, strict(work, steady=["devices.py"]))
    assert executor.model.current.host_inputs.num_bytes == taken > 0


def test_nor_is_host_memory_of_kept_attention_taken_in_a_chunk(make_step):
    executor, work = make_step("qwen3", kept={0: "host", 1: "host"})
    executor.run(work, 30, strict(work, steady=["devices.py"]))
    assert executor.kept_attention.host.num_bytes > 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.item(),
        lambda tensor: bool((tensor > 0).all()),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.index_put_((tensor > 0,), tensor[0]),
        lambda tensor: torch.masked_select(tensor, tensor > 0),
        lambda tensor: torch.unique(tensor),
        lambda tensor: torch.equal(tensor, tensor.clone()),
    ],
)
def test_the_mode_refuses_what_waits_and_lets_the_host_look_at_its_own(wait):
    tensor = torch.ones(1)
    with pytest.raises(RefusedError, match="waits for the device"), NoHostWaits():
        wait(tensor)
    with NoHostWaits(host=[tensor]):
        wait(tensor)


def test_what_fsdp_looks_for_tensors_in_has_no_spans(make_step):
    """It looks in all arguments of what is sharded, in every forward: of chunks of many sequences that took long."""
    executor, work = make_step("llama")
    seen = []

    class Spans(tuple):
        def __iter__(self):
            assert not looking, "FSDP would look in every span"
            return super().__iter__()

    looking = []

    def look(arguments):
        looking.append(True)
        seen.append(len(collect_grad_tensors(arguments)))
        looking.clear()

    def call(do, *arguments):
        look((do, *arguments))
        return do(*arguments)

    model = executor.model
    for layer in model.own_layers.values():
        layer.register_forward_pre_hook(lambda layer, args, kwargs: look((args, kwargs)), with_kwargs=True)
    tensors = {chunk_id: replace(each, spans=Spans(each.spans)) for chunk_id, each in work.tensors.items()}
    RankExecutor(replace(model, call=call)).run(replace(work, tensors=tensors), 30)
    assert len(seen) > 20
    assert sum(seen) > 0
