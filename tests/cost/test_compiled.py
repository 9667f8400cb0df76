"""What predictions know of compiled layers, and of chunks of several sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chunkplan.cost.durations import attention_pairs_of, durations
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import LayerTime
from chunkplan.cost.shape import QWEN2_5_7B, ModelShape
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.operations import OPS
from chunkplan.tuning.document import _options_entry
from chunkplan.tuning.options import LADDER
from tests.support.places import ROOT
from tests.support.tuning_cases import options_with

LAYER = QWEN2_5_7B.kinds[0]
H200 = load_hardware("h200")


def shape_with(**changes: Any) -> ModelShape:
    """A 7B whose layers are other ones."""
    return replace(QWEN2_5_7B, kinds=(replace(LAYER, **changes),))


def test_compiled_layers_move_fewer_bytes_in_fewer_kernels() -> None:
    """Of Qwen2.5-7B: 101 K numbers of a token, not 286 K, 13 kernels, not 38, and 5 bytes of a logit, not 16."""
    plain, compiled = (CostModel(hardware=H200, compile=each).rates for each in (False, True))
    byte = 1e9 / H200.copy_bytes
    assert plain.token - compiled.token == pytest.approx(2 * (286_208 - 100_864) * byte)
    assert plain.chunk - compiled.chunk == pytest.approx(25 * H200.kernel_ns)
    assert compiled.launch == pytest.approx(0.9 * plain.launch)
    assert plain.head - compiled.head == pytest.approx(11 * 152064 * byte)
    assert plain.pair == compiled.pair and plain.sums.layer == compiled.sums.layer
    assert plain.sums.head.token == pytest.approx(2 * compiled.sums.head.token, rel=1e-3)  # blocks of twice the tokens


def test_compiled_layers_hold_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak of a step of short sequences, of a 1.5B in chunks of 8,192, without the optimizer's states; GiB."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_plans import PLANS  # type: ignore[import-not-found]

    held = []
    for compiled, measured in ((False, 38.68), (True, 31.73)):
        cost = PLANS["1.5b-8k"].cost(optimizer="sgd", compile=compiled)
        [memory] = stage_memory(cost, dp=1, layers=(28,), held=[ResidentTokens(activations=8192)], chunk_size=8192)
        held.append((memory.total - memory.reserved) / 2**30)
        assert held[-1] == pytest.approx(measured, rel=0.04)
    assert held[0] - held[1] > 6


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": "keep-products"},
        {"checkpointing": "full:14,keep-projections:14"},
        {"shape": shape_with(state_elements=64, state_products=2)},
        {"shape": shape_with(latent_width=64)},
    ],
)
def test_layers_that_the_runtime_does_not_compile_count_as_they_are(changes: dict[str, Any]) -> None:
    plain, compiled = (CostModel(**changes, compile=each, fused_kernels="torch") for each in (False, True))
    rates = [each.rates for each in (plain, compiled)]  # but those of the loss, which is compiled in any case
    others = [each._replace(head=0, sums=each.sums._replace(head=LayerTime())) for each in rates]
    assert compiled.kernels == "torch" and others[0] == others[1]
    assert CostModel(compile=True, checkpointing="keep-attention").kernels == "compiled"


def test_entries_name_compiled_layers_only_where_there_are_some() -> None:
    compiled = CostModel(compile=True)
    assert compiled.to_dict()["compile"] is True and "compile" not in CostModel().to_dict()
    assert CostModel.from_dict(compiled.to_dict(), where="a test") == compiled
    plain, tuned = (options_with(pp=1, schedules=None, compile=each) for each in (False, True))
    assert _options_entry(tuned) == {**_options_entry(plain), "compile": True}
    [layout, *_] = tuned.layouts()
    assert [each.cost(layout, LADDER[0]).compile for each in (plain, tuned)] == [False, True]


def times(cost: CostModel, lengths: list[int]) -> dict[str, int]:
    """What each action with a chunk of whole sequences takes."""
    tokens = np.array(lengths)
    pairs = attention_pairs_of(tokens, np.zeros_like(tokens), cost.shape.attention_patterns).sum()
    found = durations(np.array([tokens.sum()]), np.array([float(pairs)]), cost.rates, (cost.shape.num_layers,))
    return {op: int(found[place, 0, 0]) for place, op in enumerate(OPS)}


def test_another_kernel_than_cudnns_attends_to_several_sequences_windows_and_large_heads() -> None:
    others = replace(H200, attention=tuple(each for each in H200.attention if each.kernel == "torch-cuda"))
    whole, other = (CostModel(hardware=each) for each in (H200, others))
    assert H200.attention[0].kernel == "torch-cudnn"
    packed, same = (times(each, [512] * 16)["forward_kv"] for each in (whole, other))
    assert packed == pytest.approx(same, abs=2)
    assert times(whole, [8192])["forward_kv"] < times(other, [8192])["forward_kv"]
    square = times(whole, [8192])["forward_kv"] - times(whole, [8191, 1])["forward_kv"]
    assert square == pytest.approx(28 * 4 * 3584 * 8192**2 / 2 * (1 / 591e12 - 1 / 303.5e12) * 1e9, rel=0.02)
    for changes in ({"window": 1024}, {"num_query_heads": 14}):
        shapes = (CostModel(shape=shape_with(**changes), hardware=each).rates for each in (H200, others))
        rates, expected = (each._replace(packed=(1.0, 0.0)) for each in shapes)
        assert rates == expected


def test_a_backward_launches_twice_the_kernels_of_a_forward() -> None:
    """Where the host is slower than the GPU, as with one token; each half launches as many as a forward."""
    cost = CostModel(hardware=replace(H200, copy_bytes=1e15))
    found, launched = times(cost, [1]), 28 * 38 * H200.launch_ns
    ops = ("forward_kv", "backward", "backward_input", "backward_weight")
    assert [found[op] / launched for op in ops] == pytest.approx([1, 2, 1, 1], rel=1e-3)


def test_of_several_stages_none_is_compiled_or_attends_by_a_kernel_that_makes_plans() -> None:
    """As the runtime leaves both out: a tuned layout and a built plan know it."""
    cost = CostModel(hardware=H200, compile=True)
    staged = cost.on_stages(2)
    assert cost.on_stages(1) is cost
    assert not staged.compile and staged.rates.pair == pytest.approx(cost.rates.pair * 1.89, rel=0.01)
    assert {each.kernel for each in cost.hardware.attention} - {each.kernel for each in staged.hardware.attention} == {
        "torch-cudnn"
    }
