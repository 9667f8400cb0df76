"""Chunks keep what attention gave in their first forward: the recompute takes it, and gradients are the same bits."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan_runtime.attention import function
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.reserve import attention_bytes
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.models.trained import add_lora
from tests.support.alive import Alive

LENGTHS = [23, 4, 9]
#: Of a sequence of four parts, the first one with a whole sequence beside it.
CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]
KEPT = {0: "host", 1: "gpu", 2: "host"}

#: By what is particular in their attention or crosses the borders of chunks, with what a default config leaves out.
MODELS = {
    "gpt_oss": {},  # sinks, sliding windows
    "deepseek_v3": {},  # latents
    "gemma3n_text": {},  # layers that borrow keys and values
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},  # states beside attention, segment by segment
    "afmoe": {},
    "apertus": {},
    "bamba": {"attn_layer_indices": [1]},
    "cohere2": {},
    "exaone4": {},
    "falcon_h1": {},
    "gemma2": {},  # softcaps
    "gemma3_text": {},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_neox": {},
    "kimi_linear": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
    "llama": {},
    "llama4_text": {"num_hidden_layers": 4},  # tiles
    "longcat_flash": {},  # two attentions a layer
    "minicpm3": {},
    "minimax": {},
    "mimo_v2_flash": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "nemotron_h": {},
    "olmo2": {},
    "olmo_hybrid": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "smollm3": {},
    "zamba2": {},  # one attention that several layers share
    "zaya": {},
}
FEW = ("gpt_oss", "deepseek_v3", "gemma3n_text", "jamba")


def config_of(model_type):
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    return AutoConfig.for_model(**tiny_document(config.to_dict()))


def work_of(plan, vocab_size):
    [work] = next(iter(PlanStream(*open_plan(*plan), vocab_size=vocab_size, max_positions=None, prefetch=0))).ranks
    return work


def step(model, work, monkeypatch, **how):
    """Gradients of a step; by op, how often attention ran in it."""
    ran = Counter()
    doing = [""]
    attend = function._attend_to_ranges

    def counted(*given):
        ran[doing[0]] += 1
        return attend(*given)

    def around(action):
        doing[0] = action.op
        return torch.enable_grad()

    model.model.zero_grad()
    executor = RankExecutor(model, **how)
    with monkeypatch.context() as patch:
        patch.setattr(function, "_attend_to_ranges", counted)
        executor.run(work, 20, around)
    gradients = {name: each.grad for name, each in model.model.named_parameters() if each.grad is not None}
    return gradients, ran, executor


@pytest.fixture
def works(handmade_plan, random_sequences):
    """The step at K 1 for a vocabulary: in which nothing is kept, and in which chunks keep attention."""

    def make(vocab_size):
        sequences = [(ids % vocab_size, target) for ids, target in random_sequences(LENGTHS)]
        plans = (handmade_plan(sequences, [{0: CHUNKS}], k=1, kept=kept) for kept in ({}, KEPT))
        return [work_of(plan, vocab_size) for plan in plans]

    return make


#: Levels, and whether keys and values are on the host: the few have one of them each, `make soak` all.
LEVELS = [("full", True), ("keep-products", True), ("none", False)]


@pytest.mark.parametrize(
    ("model_type", "levels"),
    [(name, LEVELS[number % 3 : number % 3 + 1]) for number, name in enumerate(FEW)]
    + [pytest.param(name, LEVELS, marks=pytest.mark.soak) for name in MODELS],
)
def test_gradients_are_the_same_bits_and_no_attention_is_run_in_recomputes(model_type, levels, works, monkeypatch):
    model = new_model(config_of(model_type), torch.float64, seed=3)
    model.model.double()
    for level, kv_offload in levels:
        model.set_checkpointing(level)
        with evaluate_in_float64(model.model):
            (plain, ran, _), (found, ran_now, executor) = (
                step(model, work, monkeypatch, kv_offload=kv_offload) for work in works(model.vocab_size)
            )
        assert plain.keys() == found.keys()
        assert [name for name in plain if not torch.equal(plain[name], found[name])] == []
        assert ran_now == Counter({op: count for op, count in ran.items() if op != "recompute"})
        assert ran["recompute"] == ran["forward_kv"] > 0
        host = executor.kept_attention.host
        assert executor.kept_attention.kept == {}
        assert sum(memory.nbytes for memory in host.unused) == host.num_bytes


@pytest.mark.parametrize("level", CHECKPOINTINGS)
def test_kept_attention_goes_with_every_level(level, works, monkeypatch):
    """Of what levels hold of attention is none run in backwards: it is what the recompute took."""
    model = add_lora(new_model(config_of("qwen3_moe"), torch.float64, seed=3), rank=2, alpha=4)
    model.set_checkpointing(f"{level}:1,none:{model.config.num_hidden_layers - 1}")
    (plain, ran, _), (found, ran_now, _) = (step(model, work, monkeypatch) for work in works(model.vocab_size))
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []
    assert ran_now == Counter({op: count for op, count in ran.items() if op != "recompute"})
    assert ran_now["backward"] == (len(CHUNKS) if level in ("full", "offload") else 0)


SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
#: Of a layer and a token: 4 heads of 16 numbers in bfloat16, and a float32 each.
OF_LAYER = 4 * (16 * 2 + 4)


def held_after_actions(model, work):
    """Bytes that are alive on the device after each action, and of kept attention on the host then."""
    held, on_host = [], []
    with Alive() as alive:
        executor = RankExecutor(model)

        def meet(action):
            gc.collect()
            kept = [each for results in executor.kept_attention.kept.values() for each in results.held]
            held.append(alive.num_bytes() - executor.kept_attention.host.num_bytes)
            on_host.append(sum(each.home.nbytes for each in kept if each.chunk is not None))

        executor.run(work, 20, collectives=meet)
    return held[1:], on_host[1:]


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_a_chunk_holds_out_and_log_sum_exp_of_each_layer_until_its_recompute(
    tiny_config, handmade_plan, random_sequences, where
):
    """Of what goes to the host the last layer's are on the device until others are sent or fetched."""
    model = new_model(AutoConfig.for_model(**tiny_config("qwen3", **SIZES)), torch.bfloat16, seed=3)
    for weight in model.model.parameters():
        weight.grad = torch.zeros_like(weight)
    plans = (
        handmade_plan(random_sequences(LENGTHS), [{0: CHUNKS}], k=1, kept=kept) for kept in ({}, {1: where, 2: where})
    )
    plain, found = (work_of(plan, 97) for plan in plans)
    assert [f"{action.op} {action.chunk_id}" for action in found.actions[:8]] == [
        *("forward_kv 0", "forward_kv 1", "forward_kv 2", "forward 3", "backward 3"),
        *("recompute 2", "backward 2", "recompute 1"),
    ]
    (without, _), (held, on_host) = (held_after_actions(model, work) for work in (plain, found))
    chunks = {1: 10 * OF_LAYER, 2: 6 * OF_LAYER}  # of a layer
    both = sum(chunks.values())
    kept = [0, 3 * chunks[1], *[3 * both] * 3, *[3 * chunks[1]] * 2, *[0] * (len(held) - 7)]
    leaving = [0, chunks[1], *[chunks[2]] * 3, *[0] * (len(held) - 5)]
    assert on_host == (kept if where == "host" else [0] * len(kept))
    more = [now - before for now, before in zip(held, without, strict=True)]
    assert more == (leaving if where == "host" else kept)


def test_host_memory_is_as_much_as_is_kept_there_at_once(tiny_config, handmade_plan, random_sequences, monkeypatch):
    """As many chunks as are kept there at once, each as the largest; none is taken in a second step."""
    model = new_model(AutoConfig.for_model(**tiny_config("qwen3", **SIZES)), torch.bfloat16, seed=3)
    work = work_of(handmade_plan(random_sequences(LENGTHS), [{0: CHUNKS}], k=1, kept=KEPT), 97)
    _, _, executor = step(model, work, monkeypatch)
    host = executor.kept_attention.host
    assert host.num_bytes == 2 * 3 * 6 * OF_LAYER == 2 * attention_bytes(model, work.tensors[0])
    memory = {each.data_ptr() for each in host.unused}
    executor.run(work, 20)
    assert {each.data_ptr() for each in host.unused} == memory


def test_what_a_run_that_raised_has_kept_reaches_no_other(works, monkeypatch):
    model = new_model(config_of("gpt_oss"), torch.float64, seed=3)
    _, work = works(model.vocab_size)
    plain, _, _ = step(model, work, monkeypatch)

    def fail(action):
        if action.op == "recompute":
            raise RuntimeError("here")
        return torch.enable_grad()

    executor = RankExecutor(model)
    model.model.zero_grad()
    with pytest.raises(RuntimeError, match="here"):
        executor.run(work, 20, fail)
    assert executor.kept_attention.kept
    model.model.zero_grad()
    assert executor.evaluate(work, 20).loss > 0
    executor.run(work, 20)
    assert all(torch.equal(weight.grad, plain[name]) for name, weight in model.model.named_parameters())
    assert executor.kept_attention.kept == {}
