"""The example's actor: a PPO update in chunks is that of whole sequences.

verl itself needs a GPU's kernels, so the actor beside it here is a small one with the calls of verl's own: padded rows
of prompts and responses, mini-batches, micro-batches with gradients that add up, PPO's clipped loss and an entropy
bonus over response tokens.
"""

from __future__ import annotations

import runpy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan_runtime.models.parts import evaluate_in_float64
from tests.support.places import ROOT

EXAMPLE = ROOT / "examples" / "verl_actor.py"


class SmallActor:
    """An actor like verl's `DataParallelPPOActor`, on whole rows."""

    def __init__(self, model) -> None:
        self.actor_module = model
        self.actor_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        num_tokens = micro_batch["responses"].shape[1]
        given = {name: micro_batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = self.actor_module(**given, use_cache=False).logits[:, -num_tokens - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        found = log_probs.gather(-1, micro_batch["responses"][..., None])[..., 0]
        return (entropies if calculate_entropy else None), found

    def compute_log_prob(self, data):
        self.actor_module.eval()
        with torch.no_grad():
            return self._forward_micro_batch(data, temperature=0.9)[1]

    def update_policy(self, data, *, rows_at_once: int = 4, mini_batches: int = 2):
        self.actor_module.train()
        losses = []
        for mini in zip(*(each.chunk(mini_batches) for each in data.values()), strict=True):
            for micro in zip(*(each.split(rows_at_once) for each in mini), strict=True):
                batch = dict(zip(data, micro, strict=True))
                mask = batch["attention_mask"][:, -batch["responses"].shape[1] :]
                entropies, log_probs = self._forward_micro_batch(batch, temperature=0.9, calculate_entropy=True)
                ratio = (log_probs - batch["old_log_probs"]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                terms = -torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"]) - 0.01 * entropies
                loss = (terms * mask).sum() / mask.sum() * len(mask) / len(mini[0])
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(self.actor_module.parameters(), 1.0)
            self.actor_optimizer.step()
            self.actor_optimizer.zero_grad()
        return losses


def rollouts():
    """Four prompts of up to 50 tokens with four responses of up to 20 each, padded left and right as verl pads them."""
    random = torch.Generator().manual_seed(3)
    prompts, tokens = 50, 20
    rows = {"input_ids": [], "attention_mask": []}
    for number in range(4):
        length = 50 - 7 * number
        prompt = torch.randint(2, 90, (length,), generator=random)
        for response in (20, 3, 11, 1):
            ids = torch.randint(2, 90, (response,), generator=random)
            padded = [
                torch.zeros(prompts - length, dtype=torch.long),
                prompt,
                ids,
                torch.zeros(tokens - response).long(),
            ]
            rows["input_ids"].append(torch.cat(padded))
            is_there = torch.arange(prompts + tokens)
            rows["attention_mask"].append((is_there >= prompts - length) & (is_there < prompts + response))
    data = {name: torch.stack(each).long() for name, each in rows.items()}
    data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)
    data["responses"] = data["input_ids"][:, -tokens:]
    data["advantages"] = torch.randn(16, 1, generator=random).double().expand(-1, tokens)
    return data


@pytest.mark.parametrize("chunk_size", [8, 64])
def test_two_updates_are_those_of_whole_rows(chunk_size, tiny_config) -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["InChunks"]._forward_micro_batch.__globals__["CHUNK_SIZE"] = chunk_size
    chunked = type("Actor", (example["InChunks"], SmallActor), {})
    found = []
    for kind in (SmallActor, chunked):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config()), dtype=torch.float64)
        actor, data = kind(model), rollouts()
        with evaluate_in_float64(model):
            old = data["old_log_probs"] = actor.compute_log_prob(data)
            losses = [*actor.update_policy(data), *actor.update_policy(data)]
        found.append((old * data["attention_mask"][:, -20:], losses, dict(model.named_parameters())))
    (old, losses, weights), (same_old, same_losses, same) = found
    torch.testing.assert_close(same_old, old, rtol=1e-12, atol=1e-12)
    assert same_losses == pytest.approx(losses, rel=1e-11)
    assert max((same[name] - weight).norm() / weight.norm() for name, weight in weights.items()) < 1e-12


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 45
