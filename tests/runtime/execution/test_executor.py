"""The executor does what the plan says, leaves nothing behind, and refuses actions that would not be exact."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from chunkplan.errors import DataError
from chunkplan_runtime.attention import function
from chunkplan_runtime.execution import loss
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.loss import cross_entropy
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.kv.pages import KVRequest
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import Head, new_model
from tests.support.alive import store_bytes

CHUNKS = [[(0, 0, 6)], [(0, 6, 12), (1, 0, 4)], [(0, 12, 18)], [(0, 18, 23)], [(2, 0, 9)]]


@pytest.fixture
def run_step(tiny_config, handmade_plan, random_sequences):
    """Runs one step of `CHUNKS`; returns loss, gradients and executor."""

    def run(k=1, dtype=torch.float32, actions=None, watch=lambda executor: None):
        model = new_model(AutoConfig.for_model(**tiny_config("qwen2")), torch.bfloat16, seed=3)
        model.model.to(dtype)  # the same weights whatever the dtype
        plan, analysis = handmade_plan(random_sequences([23, 4, 9]), [{0: CHUNKS}], k=k, actions=actions)
        stream = PlanStream(*open_plan(plan, analysis), vocab_size=97, max_positions=256)
        work = next(iter(stream))
        executor = RankExecutor(model)

        def around(action):
            watch(executor)
            return nullcontext()

        loss = executor.run(work.ranks[0], work.step.num_target_tokens, around).loss
        return loss, {name: value.grad for name, value in model.model.named_parameters()}, executor

    return run


def test_gradients_are_the_same_bits_whatever_k(run_step):
    loss, gradients, _ = run_step(k=1)
    for k in (2, 4, 9):
        other_loss, other, _ = run_step(k=k)
        assert other_loss == loss
        assert all(torch.equal(other[name], gradients[name]) for name in gradients)


def test_nothing_stays_in_the_store_after_a_step(run_step):
    seen = []
    _, _, executor = run_step(k=2, watch=lambda executor: seen.append(store_bytes(executor.stores[0])))
    # KV of 23 tokens, 2 layers, 2 KV heads of 8; the gradients as much again.
    assert max(seen) == 2 * 23 * 2 * 2 * 8 * 4 * 2
    assert seen[-1] == 0  # the last chunk, standalone, runs after the group has given everything back
    assert store_bytes(executor.stores[0]) == 0
    assert executor.stores[0].is_empty


def test_bfloat16_is_close_to_float64_and_keeps_kv_gradients_in_float32(run_step):
    loss, gradients, _ = run_step(dtype=torch.bfloat16)
    exact_loss, exact, _ = run_step(dtype=torch.float64)
    assert loss == pytest.approx(exact_loss, rel=0.01)
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() < 0.05 * exact[name].norm()
    store, span = KVStore(page_tokens=8), Span(0, 0, 4, length=8, chunk_start=0)
    kv = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    store.start_forward(span)
    store.write(span, 0, (kv, kv))
    (block,) = store.blocks(span, 0, 0, KVRequest((kv, kv), with_gradients=True))
    assert {tensor.dtype for tensor in block.tensors} == {torch.bfloat16}
    assert [gradient.dtype for gradient in block.gradients] == [torch.float32] * 2


GROUP = [("forward", 0), ("forward", 1), ("forward", 2), ("forward", 3)]
DESCENDING = [("backward", 3), ("backward", 2), ("backward", 1), ("backward", 0)]
ALONE = [("forward", 4), ("backward", 4)]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (GROUP + DESCENDING[::-1] + ALONE, "backward of tokens 0 to 6 of sequence 0 is out of order"),
        (GROUP[:2] + GROUP[3:] + GROUP[2:3] + DESCENDING + ALONE, "forward of tokens 18 to 23 of sequence 0"),
        (GROUP + DESCENDING, "no backward of chunk 4"),
        (GROUP + DESCENDING + ALONE[:1] + ALONE, "forward of chunk 4 after forward"),
        (GROUP + DESCENDING + ALONE[1:], "backward of chunk 4 after nothing"),
        (GROUP + DESCENDING + [("recompute", 4)], "recompute of chunk 4 after nothing"),
        (GROUP + DESCENDING + [("forward_kv", 4), ("backward", 4)], "backward of chunk 4 after forward_kv"),
        (GROUP + DESCENDING + ALONE + [("forward", 7)], "chunk 7, which does not exist"),
    ],
)
def test_actions_that_would_not_be_exact_are_refused(run_step, actions, message):
    with pytest.raises(DataError, match=message) as raised:
        run_step(k=4, actions=actions)
    assert "chunkplan validate" in raised.value.hint


def weights(num_tokens, weight):
    return torch.full((num_tokens,), weight, dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_plain_one_in_blocks_of_any_size(monkeypatch, smoothing):
    monkeypatch.setattr("chunkplan.cost.optimizers.LOGITS_AT_ONCE", 3 * 20)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 20, dtype=torch.float64)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 4, 5, -100, 6, 7, 8, 9, 19, -100])
    how = {"ignore_index": -100, "label_smoothing": smoothing}
    plain = torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum", **how)
    expected, of_weight = torch.autograd.grad(plain / 7, [hidden, head.weight])
    losses, gradient = cross_entropy(smoothing)(Head(head, 20), hidden, labels, weights(11, 1 / 7))
    torch.testing.assert_close(losses.sum(), plain, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-16)
    torch.testing.assert_close(head.weight.grad, of_weight, rtol=1e-13, atol=1e-16)
    with torch.no_grad():
        plain_losses, _ = cross_entropy()(Head(head, 20), hidden, labels, weights(11, 1.0))
    assert torch.equal(losses, plain_losses) == (smoothing == 0)
    assert torch.equal(losses != 0, labels >= 0)


def test_without_targets_the_loss_is_a_zero_with_a_zero_gradient():
    hidden = torch.full((3, 8), torch.inf, requires_grad=True)
    losses, gradient = cross_entropy()(Head(torch.nn.Linear(8, 20), 20), hidden, torch.full((3,), -100), torch.ones(3))
    assert torch.equal(losses, torch.zeros(3))
    assert torch.equal(gradient, torch.zeros(3, 8))


def test_a_forward_that_keeps_only_kv_saves_no_activations(run_step):
    """What K bounds: with K = 1 of four parts, autograd holds one part's activations at a time, with K = 4 all."""

    def most_alive(k):
        alive, most = 0, 0

        class Saved:
            def __init__(self, tensor):
                nonlocal alive, most
                self.tensor = tensor
                alive += tensor.nbytes
                most = max(most, alive)

            def __del__(self):
                nonlocal alive
                alive -= self.tensor.nbytes

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            run_step(k=k)
        assert alive == 0
        return most

    assert most_alive(1) < 0.5 * most_alive(4)


def test_logits_are_never_held_for_more_than_a_block_of_rows(monkeypatch):
    """The head sees as many positions at once as their logits allow, and only those with a target."""
    monkeypatch.setattr("chunkplan.cost.optimizers.LOGITS_AT_ONCE", 4 * 11 + 10)
    head, seen = torch.nn.Linear(8, 11, dtype=torch.float64), []
    head.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.where(torch.arange(23) % 3 > 0, torch.arange(23) % 11, -100)
    losses, _ = cross_entropy()(Head(head, 11), hidden, labels, weights(23, 1.0))
    assert max(seen) == 4
    assert sum(seen) == int((labels >= 0).sum())
    whole = torch.nn.functional.cross_entropy(head(hidden), labels, ignore_index=-100, reduction="sum")
    assert losses.sum().item() == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, pytest.param(0.1, marks=pytest.mark.soak)])
def test_a_compiled_loss_is_the_same(smoothing, monkeypatch):
    """Of blocks of any number of rows, one of a single row among them, with one graph."""
    monkeypatch.setattr("chunkplan.cost.optimizers.LOGITS_AT_ONCE", 6 * 50)
    torch.manual_seed(0)
    for rows in (13, 17):  # blocks of six, and the rest
        head, hidden = torch.nn.Linear(8, 50).double(), torch.randn(rows, 8, dtype=torch.float64)
        labels = torch.randint(0, 50, (rows,), dtype=torch.int32)
        found = []
        for compiled in (False, True):
            head.zero_grad()
            made = cross_entropy(smoothing)(Head(head, 50, compiled), hidden, labels, weights(rows, 1 / rows))
            found.append((*made, head.weight.grad, head.bias.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-16)


def test_where_nothing_can_be_compiled_the_loss_is_made_as_it_is_and_a_note_says_so(capsys):
    from torch._inductor import config

    hidden, labels = torch.randn(5, 8, dtype=torch.float64), torch.arange(5, dtype=torch.int32)
    found = []
    loss._compiled.cache_clear()
    torch._dynamo.reset()
    with config.patch({"cpp.cxx": (None, "/nonexistent"), "force_disable_caches": True}):
        for compiled in (False, True, True):
            head = torch.nn.Linear(8, 20).double()
            torch.nn.init.constant_(head.weight, 0.1)
            torch.nn.init.zeros_(head.bias)
            found.append(cross_entropy()(Head(head, 20, compiled), hidden, labels, weights(5, 1.0)))
    loss._compiled.cache_clear()
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
    said = capsys.readouterr().err
    assert said.count("note: losses are made as they are, not compiled: InvalidCxxCompiler") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_takes_the_memory_that_the_planner_counts_for_it(dtype, monkeypatch):
    """8 bytes of each logit of a block, for whichever block; as torch's profiler has it."""
    rows, vocab_size = 256, 5000
    monkeypatch.setattr("chunkplan.cost.optimizers.LOGITS_AT_ONCE", rows * vocab_size)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, vocab_size, bias=False, dtype=dtype)
    hidden, labels = torch.randn(3 * rows, 8, dtype=dtype), torch.arange(3 * rows) * 6
    plain = torch.nn.functional.cross_entropy(head(hidden).float(), labels)
    (of_weight,) = torch.autograd.grad(plain, [head.weight])
    weights = torch.full((len(labels),), 1 / len(labels))
    with torch.profiler.profile(profile_memory=True) as profiled:
        losses, _ = cross_entropy()(Head(head, vocab_size), hidden, labels, weights)
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    alive = np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    assert 7 < alive.max() / (rows * vocab_size) < 9
    torch.testing.assert_close(losses.mean(), plain)
    torch.testing.assert_close(head.weight.grad, of_weight, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_step_that_failed_can_be_run_again_on_the_same_executor(run_step, monkeypatch):
    """An interruption anywhere in a backward leaves no half of a KV gradient behind."""
    _, expected, _ = run_step(k=4)
    calls = 0
    backward = function.ChunkAttention.backward

    def failing(ctx, *gradients):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("as a device says it")
        return backward(ctx, *gradients)

    run = RankExecutor.run

    def run_twice(executor, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(function.ChunkAttention, "backward", staticmethod(failing))
            with pytest.raises(MemoryError):
                run(executor, *arguments)
        executor.model.model.zero_grad()
        return run(executor, *arguments)

    monkeypatch.setattr(RankExecutor, "run", run_twice)
    _, again, _ = run_step(k=4)
    assert calls == 3
    assert all((again[name] == expected[name]).all() for name in expected)
