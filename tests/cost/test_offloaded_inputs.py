"""The level `offload`: what its way to the host takes, alone and with keys and values, and what is held where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chunkplan.cost.activations import activation_bytes_per_token, working_bytes_per_token
from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.durations import attention_pairs_of, durations
from chunkplan.cost.memory import memory_rates
from chunkplan.operations import OPS
from chunkplan.planning.memory import stage_host_bytes
from tests.support.plain import PLAIN, plain_cost

LAYERS = (7, 7, 7, 7)
TOKENS, PREFIX = np.array([8192, 100]), np.array([65536, 0])
PAIRS = attention_pairs_of(TOKENS, PREFIX)
INPUT = 2 * 3584
FULL, OFFLOAD = (plain_cost(checkpointing=level) for level in ("full", "offload"))
[LAYER] = FULL.shape.kinds


def with_link(cost, gigabytes):
    return replace(cost, hardware=replace(PLAIN, host_bytes=gigabytes * 1e9))


def times_of(cost):
    return {op: durations(TOKENS, PAIRS, cost.rates, LAYERS)[OPS.index(op)] for op in OPS}


def test_a_link_that_is_fast_enough_costs_nothing():
    """Of Qwen2.5-7B on an H100 it takes 0.15 us a token and layer, where a forward takes 0.92."""
    assert OFFLOAD.rates.again.host == pytest.approx(150, rel=0.01)
    assert OFFLOAD.rates.token == pytest.approx(920, rel=0.01)
    for offload, full in zip(times_of(OFFLOAD).values(), times_of(FULL).values(), strict=True):
        np.testing.assert_array_equal(offload, full)


def test_what_a_slow_link_takes_is_what_layers_take():
    """Where activations are kept, and where they are read; not where nothing is, or weights alone get gradients."""
    found, full = times_of(with_link(OFFLOAD, 0.1)), times_of(FULL)
    way = np.rint(7 * INPUT * TOKENS * 10)
    for op in ("forward", "recompute", "backward", "backward_input"):
        np.testing.assert_array_equal(found[op][1:3], np.maximum(full[op][1:3], way))
        assert found[op][1, 0] > full[op][1, 0]
    for op in ("forward_kv", "backward_weight"):
        np.testing.assert_array_equal(found[op], full[op])


def test_keys_and_values_of_the_prefix_share_the_link():
    """With their gradients in a backward: 512 numbers each, at 2 bytes, and at 4 more."""
    slow = with_link(OFFLOAD, 1)
    alone, shared = times_of(slow), times_of(replace(slow, kv_offload=True))
    way = 7 * (INPUT * TOKENS + np.outer([2, 6], 1024 * PREFIX))
    assert (way[:, 0] > [alone["forward"][0, 0], alone["backward"][0, 0]]).all()
    np.testing.assert_allclose(shared["forward"][0], np.maximum(alone["forward"][0], way[0]), rtol=1e-6)
    np.testing.assert_allclose(shared["backward"][1], np.maximum(alone["backward"][1], way[1]), rtol=1e-6)
    full = with_link(FULL, 1)
    for one, other in zip(times_of(full).values(), times_of(replace(full, kv_offload=True)).values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stage_waits_for_the_inputs_of_its_own_layers():
    mixed = with_link(plain_cost(checkpointing="offload:7,full:10,none:11"), 1)
    found, full = times_of(mixed)["forward"], times_of(FULL)["forward"]
    np.testing.assert_array_equal(found[0], times_of(with_link(OFFLOAD, 1))["forward"][0])
    np.testing.assert_array_equal(found[1:], full[1:])


def test_layers_hold_nothing_and_a_chunk_two_inputs():
    assert activation_bytes_per_token(OFFLOAD, LAYER) == 0
    working = [working_bytes_per_token(cost, LAYER, cost.levels[0]) for cost in (OFFLOAD, FULL)]
    assert working[0] - working[1] == 2 * INPUT


def test_a_token_in_flight_takes_what_lies_around_the_layers():
    """What came from the stage before, positions and rotary embeddings, and the final norm."""
    rotary, norm = 2 * 128 * 2, 3584 * 8 + 4
    first, *middle, last = memory_rates(OFFLOAD, 4, LAYERS, 8192).tokens[:, 0]
    assert (first, last) == (8 + rotary, INPUT + 4 + rotary + norm)
    assert middle == [INPUT + 4 + rotary] * 2
    with_adapters = memory_rates(replace(OFFLOAD, lora_rank=8), 4, LAYERS, 8192).tokens
    assert last - with_adapters[3, 0] == INPUT
    mixed = memory_rates(plain_cost(checkpointing="full:14,offload:14"), 4, LAYERS, 8192).tokens[:, 0]
    kept = 7 * INPUT + 4 + rotary  # the first layer of a stage keeps what came
    np.testing.assert_array_equal(mixed, [kept + 4, kept, middle[1], last])


def test_the_host_has_the_inputs_of_all_tokens_in_flight_and_keys_and_values():
    tokens = {"retained_tokens": [40, 30, 20, 10], "kv_tokens": [100, 100, 100, 100], "attention_tokens": [0] * 4}
    of_layer = 7 * INPUT
    assert stage_host_bytes(FULL, layers=LAYERS, **tokens) == (0, 0, 0, 0)
    assert stage_host_bytes(OFFLOAD, layers=LAYERS, **tokens) == tuple(of_layer * n for n in (40, 30, 20, 10))
    kv = 7 * 100 * 1024 * (2 + 4)
    both = replace(OFFLOAD, kv_offload=True)
    assert stage_host_bytes(both, layers=LAYERS, **tokens) == tuple(of_layer * n + kv for n in (40, 30, 20, 10))
    assert stage_host_bytes(replace(FULL, kv_offload=True), layers=LAYERS, **tokens) == (kv,) * 4
    kept = tokens | {"attention_tokens": [50] * 4}
    of_attention = 7 * 50 * (3584 * 2 + 28 * 4)
    assert stage_host_bytes(FULL, layers=LAYERS, **kept) == (of_attention,) * 4
    mixed = plain_cost(checkpointing="offload:5,full:23")
    assert stage_host_bytes(mixed, layers=LAYERS, **tokens) == (5 * INPUT * 40, 0, 0, 0)
    halves = {name: each[:2] for name, each in tokens.items()}
    virtual = stage_host_bytes(mixed, layers=LAYERS, **halves)  # two virtual stages: tokens count for each that holds
    assert virtual == (5 * INPUT * 40, 0)


def test_the_level_is_said_in_words():
    offloaded = "full activation checkpointing, offloaded to CPU"
    assert checkpointing_words("offload") == [offloaded]
    assert checkpointing_words("offload:2,keep-products:1,none:3") == [
        f"{offloaded} in 2 of 6 layers, selective in others"
    ]
