"""A loss over the log-probabilities of a step is exact on any layout of processes; of it only numbers cross them."""

from __future__ import annotations

import pytest

from chunkplan_runtime.parity import TOLERANCE
from tests.runtime.test_parity import MODELS
from tests.support.step_loss_cases import compare_step_loss, preference, with_entropy_bonus

LLAMA = MODELS["llama with biases, tied"]


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ({"dp": 2, "lengths": [41, 13]}, {}),
        ({"dp": 2, "pp": 2, "k": 1, "schedule": "1f1b"}, {}),
        ({"dp": 2, "k": 1}, {"sharding": "weights"}),
        pytest.param({"pp": 2, "schedule": "zero-bubble"}, {"kv_offload": True}, marks=pytest.mark.soak),
        pytest.param({"dp": 4, "lengths": [41, 12, 5]}, {"sharding": "gradients"}, marks=pytest.mark.soak),
        pytest.param({"dp": 2, "pp": 2, "schedule": "interleaved"}, {}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("loss", [preference, pytest.param(with_entropy_bonus, marks=pytest.mark.soak)])
def test_loss_and_gradients_are_those_of_whole_sequences(pool, plan_of, plan, how, loss):
    world_size = plan.get("dp", 1) * plan.get("pp", 1)
    for value, expected, error in pool.run(world_size, compare_step_loss, **plan_of(LLAMA, **plan), loss=loss, **how):
        assert value == pytest.approx(expected, rel=1e-12)
        assert error <= TOLERANCE


@pytest.mark.parametrize("loss", [preference, with_entropy_bonus])
def test_ranks_that_share_sequences_have_them_once(pool, plan_of, loss):
    plan = plan_of(LLAMA, lengths=[40, 9, 5], dp=2, k=1, cp="auto")
    for value, expected, error in pool.run(2, compare_step_loss, **plan, loss=loss):
        assert value == pytest.approx(expected, rel=1e-12)
        assert error <= TOLERANCE
