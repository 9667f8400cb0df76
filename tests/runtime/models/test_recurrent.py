"""Layers that keep a state go on with it over the borders of chunks, and give its gradient back over them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from chunkplan import PlanConfig, build, build_like
from chunkplan.errors import DataError, UsageError
from chunkplan_runtime.devices import no_device_waits
from chunkplan_runtime.distributed.sharding import Shards
from chunkplan_runtime.feed.stream import ChunkTensors
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.checks import check_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.recurrent import StateCache, is_recurrent, keeps_kv
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.parity import compare_plan
from chunkplan_runtime.proof.prove import spread_weights
from tests.support.alive import store_bytes
from tests.support.mixed_chunks import LENGTHS
from tests.support.mixed_chunks import MIXED as WITH_ONE_TOKEN
from tests.support.shared_plans import given_blocks

MIXED = [*WITH_ONE_TOKEN[:5], [(4, 13, 15)], [(4, 15, 30)]]

#: By what their layers are, with what a default config leaves out.
RECURRENT = {
    "qwen3_next": {},  # gated delta rule, attention, mixtures
    "mamba2": {},
    "nemotron_h": {},  # Mamba-2, attention, mixtures, each a layer of its own
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "jamba": {},  # Mamba's first version, attention, mixtures
    "minimax": {},  # lightning attention, in a cache of its own
    "llama4_text": {},  # no state, but a scale by the number of tokens before, and attention in tiles
}


@pytest.fixture
def model():
    def make(model_type):
        config = AutoConfig.for_model(model_type, **RECURRENT[model_type])
        made = new_model(AutoConfig.for_model(**tiny_document(config.to_dict())), torch.float64, seed=1)
        spread_weights(made.model)
        return made

    return make


def keep_size(sizes, saved):
    sizes.append(saved.nbytes)
    return saved


@pytest.mark.parametrize(
    ("k", "kv_offload"), [(1, True), *(pytest.param(k, False, marks=pytest.mark.soak) for k in (2, 5))]
)
@pytest.mark.parametrize("model_type", RECURRENT)
def test_states_are_exact_over_all_borders(model_type, k, kv_offload, model, handmade_plan, random_sequences):
    """Packed, split and mixed chunks; of the short sequences beside a part none sees its state."""
    sequences = [(ids % 64, target) for ids, target in random_sequences(LENGTHS)]
    plan, analysis = handmade_plan(sequences, [{0: MIXED}], k=k)
    report = compare_plan(plan, analysis, model(model_type), kv_offload=kv_offload)
    assert report.max_relative_error < 1e-10, "the delta rule divides by small norms"
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-12)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in ("jamba", "minimax") else pytest.mark.soak) for each in RECURRENT],
)
def test_checkpointed_layers_begin_again_with_the_states_of_their_segment(
    model_type, model, handmade_plan, random_sequences
):
    sequences = [(ids % 64, target) for ids, target in random_sequences(LENGTHS)]
    plan, analysis = handmade_plan(sequences, [{0: MIXED}], k=2)
    checkpointed = model(model_type)
    checkpointed.set_checkpointing("full")
    assert compare_plan(plan, analysis, checkpointed).max_relative_error < 1e-10


def test_checkpoints_keep_less(model):
    def kept_bytes(*, checkpointing):
        made = model("nemotron_h")
        if checkpointing:
            made.set_checkpointing("full")
        tensors = ChunkTensors(
            torch.zeros(1, 30, dtype=torch.int32),
            torch.arange(30, dtype=torch.int32)[None],
            torch.zeros(30, dtype=torch.int64),
            (Span(0, 0, 30, 30, 0, None),),
        )
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(partial(keep_size, sizes), lambda saved: saved):
            made.hidden_states(tensors, KVStore(30))
        return sum(sizes)

    assert kept_bytes(checkpointing=True) < kept_bytes(checkpointing=False) / 5


def test_parts_of_one_token_are_no_steps_of_generation(model, handmade_plan, random_sequences):
    [(ids, target)] = random_sequences([5])
    parts = [[(0, 0, 4)], [(0, 4, 5)]]
    for model_type in RECURRENT:
        plan, analysis = handmade_plan([(ids % 64, target)], [{0: parts}], k=1)
        assert compare_plan(plan, analysis, model(model_type)).max_relative_error < 1e-10
    plan, analysis = handmade_plan([(ids % 64, target)], [{0: [[(0, 0, 2)], [(0, 2, 3)], [(0, 3, 5)]]}], k=1)
    with pytest.raises(DataError, match="token 2 of sequence 0 is a part by itself and not the last one"):
        compare_plan(plan, analysis, model("mamba2"))


def test_states_lie_on_the_host_where_keys_and_values_do():
    memory = HostMemory(torch.device("cpu"))
    state = torch.ones(3)
    fetch = memory.hold(state)
    state.zero_()
    assert torch.equal(fetch(), torch.ones(3)), "what is kept is a copy"
    with no_device_waits():
        assert memory.hold(state)() is state, "no memory is taken while stages wait for one another"


def test_no_pages_are_reserved_for_layers_with_a_state_alone(model):
    config = model("qwen3_next").config
    assert keeps_kv(config) == [kind == "full_attention" for kind in config.layer_types]
    assert keeps_kv(AutoConfig.for_model("falcon_h1", num_hidden_layers=3)) == [True] * 3, "both in each layer"
    assert keeps_kv(AutoConfig.for_model("llama", num_hidden_layers=3)) == [True] * 3
    assert not any(keeps_kv(model("mamba2").config))


def test_memory_is_flat_in_the_length_of_a_sequence(model):
    """A part saves as much wherever it lies, leaves a state of one size at its end, and takes no page."""
    made = model("mamba2")
    store, size = KVStore(16), 16
    saved = []
    states = []
    for start in range(0, 8 * size, size):
        part = Span(0, start, start + size, 9 * size, 0, 0)
        tensors = ChunkTensors(
            torch.zeros(1, size, dtype=torch.int32),
            torch.arange(start, start + size, dtype=torch.int32)[None],
            torch.zeros(size, dtype=torch.int64),
            (part,),
        )
        store.start_forward(part)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(partial(keep_size, sizes), lambda given: given):
            made.hidden_states(tensors, store)
        saved.append(sum(sizes))
        states.append(sum(state.nbytes for state in store.states_before(part._replace(start=part.stop)).values()))
    assert len({*saved[1:]}) == 1 and saved[0] <= saved[1]
    assert len({*states}) == 1 and states[0] > 0
    assert store_bytes(store) == 0


def test_without_the_gradients_of_states_it_would_not_be_exact(model, handmade_plan, random_sequences, monkeypatch):
    sequences = [(ids % 64, target) for ids, target in random_sequences(LENGTHS)]
    plan, analysis = handmade_plan(sequences, [{0: MIXED}], k=2)
    monkeypatch.setattr(KVStore, "take_state_gradients", lambda *_: {})
    assert compare_plan(plan, analysis, model("mamba2")).max_relative_error > 1e-3


def test_checkpoints_of_transformers_are_refused(model, handmade_plan, random_sequences):
    """They run a layer without its cache, so that its states would be left out without a word."""
    plan, analysis = handmade_plan([(ids % 64, target) for ids, target in random_sequences([9])], [{0: [[(0, 0, 9)]]}])
    made = model("qwen3_next")
    made.model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="activation checkpointing of a qwen3_next model leaves out its states"):
        compare_plan(plan, analysis, made)


def test_what_cannot_be_done_with_states_is_refused_by_name(model, tmp_path):
    assert not is_recurrent(AutoConfig.for_model("llama"))
    for sharding in ("gradients", "weights"):
        with pytest.raises(UsageError, match=f"--sharding {sharding} of a mamba2 model"):
            Shards(model("mamba2"), None, master_weights=False, sharding=sharding)
    with given_blocks({40: (0, 2, 1)}):
        np.save(tmp_path / "lengths.npy", [40, 3])
        plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1, dp=2, cp="auto"))
    with pytest.raises(UsageError, match="processes cannot share sequences of a mamba2 model"):
        check_plan(model("mamba2").config, plan)
    check_plan(model("mamba2").config, build_like(plan.path, tmp_path / "one", dp=1))


def test_a_state_is_assigned_and_not_copied_into(model):
    """So that the part before and the part after are of different graphs."""
    config = model("qwen3_next").config
    cache = StateCache(config, {}, 0)
    layer = cache.layers[0]
    first = layer.update_conv_state(torch.ones(1, 3, 2, requires_grad=True), conv_kernel_size=4)
    assert first.shape == (1, 3, 4) and first[..., :2].abs().max() == 0
    state = cache.states()[0, "conv_states", 0]
    assert state.requires_grad and state.shape == (1, 3, 4)
    again = StateCache(config, {(0, "conv_states", 0): state.detach()}, 1)
    full = again.layers[0].update_conv_state(torch.full((1, 3, 1), 2.0), conv_kernel_size=4)
    assert full.shape == (1, 3, 5)
    assert torch.equal(again.states()[0, "conv_states", 0], full[..., -4:])
