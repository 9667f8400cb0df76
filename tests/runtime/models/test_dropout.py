"""Whatever a layer draws, and whenever it begins to, it draws alike in a chunk's first forward and in every other."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model

CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]


def noisy(draw, forward, hidden):
    return draw(forward(hidden))


def dropped(hidden):
    return nn.functional.dropout(hidden, 0.3)


def jittered(hidden):
    return hidden * torch.empty_like(hidden).uniform_(0.9, 1.1)


def sampled(hidden):
    return hidden + torch.bernoulli(hidden.detach().sigmoid())


def of_many_tokens(hidden):
    """As an expert draws nothing where no token comes to it."""
    return dropped(hidden) if hidden.shape[-2] > 6 else hidden


def of_the_layer(hidden):
    """As layers that are left out at random."""
    return hidden * 2 if torch.rand(()) < 0.5 else hidden


@pytest.mark.parametrize(
    ("draw", "checkpointing"),
    [
        pytest.param(draw, level, marks=() if draw is dropped or level == levels[0] else pytest.mark.soak)
        for draw, levels in zip(
            (dropped, jittered, sampled, of_many_tokens, of_the_layer),
            permutations(("none", "full", "keep-attention")),
            strict=False,
        )
        for level in levels
    ],
)
def test_a_layer_that_begins_to_draw_after_a_step_draws_alike_whatever_k(
    tiny_config, handmade_plan, random_sequences, draw, checkpointing
):
    model = new_model(AutoConfig.for_model(**tiny_config("qwen2")), torch.float64, seed=3)
    model.set_checkpointing(checkpointing)
    sequences = random_sequences([23, 4, 9])

    def step(k):
        plan = handmade_plan(sequences, [{0: CHUNKS}], k=k)
        work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256)))
        torch.manual_seed(k)  # what was drawn before does not matter
        loss = sum(RankExecutor(model).run(rank, work.step.num_target_tokens).loss for rank in work.ranks)
        found = {name: each.grad for name, each in model.model.named_parameters() if each.grad is not None}
        model.model.zero_grad()
        return loss, found

    plain, _ = step(1)
    for layer in model.model.get_decoder().layers:
        layer.mlp.forward = partial(noisy, draw, layer.mlp.forward)
    (loss, expected), *others = (step(k) for k in (1, 2, 4))
    assert loss != plain
    for other, found in others:
        assert other == loss
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
