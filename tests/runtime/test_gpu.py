"""What needs a CUDA GPU: its kernels against plain attention, the same bits with KV on the host, exactness there."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from chunkplan_runtime.attention.form import Form
from chunkplan_runtime.attention.kernel import KERNELS
from chunkplan_runtime.execution.executor import Executor
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.parity import compare_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch with CUDA"),
]

FORMS = [
    (300, 300, Form(0.1, causal=True)),
    (100, 300, Form(0.1, causal=True)),
    (100, 300, Form(0.1, causal=False)),
    (300, 300, Form(0.1, causal=True, borders=(0, 40, 41, 300))),
    (300, 300, Form(0.1, causal=False, borders=(0, 40, 41, 300))),
    (100, 300, Form(0.1, causal=True, reach=50)),
    (60, 80, Form(0.1, causal=False, reach=70)),
    (300, 300, Form(0.1, causal=True, reach=9, borders=(0, 40, 41, 300))),
    (100, 300, Form(0.1, causal=True, softcap=5.0)),
]


@pytest.mark.parametrize(("num_queries", "num_keys", "form"), FORMS)
@pytest.mark.parametrize("name", ["flash-attn-2", "torch-cuda"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (8, 128)])
def test_a_kernel_is_plain_attention(name, num_queries, num_keys, form, kv_heads, head_dim):
    device, dtype = torch.device("cuda"), torch.bfloat16
    kernel = KERNELS[name]
    if (reason := kernel.why_not(device, dtype, (head_dim, head_dim), form)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 8, num_queries, head_dim, dtype=dtype, device=device)
    key, value = torch.randn(2, num_keys, kv_heads, head_dim, dtype=dtype, device=device).transpose(1, 2)
    out, lse = kernel.forward(query, key, value, form)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
    exact = [tensor.double() for tensor in (query, key, value)]
    expected = KERNELS["reference"].forward(*exact, form)
    expected_gradients = KERNELS["reference"].backward(grad_out.double(), *exact, *expected, form)
    for found, wanted in zip((out, lse, *gradients), (*expected, *expected_gradients), strict=True):
        assert (found.double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.fixture
def run_step(tiny_config, handmade_plan, random_sequences):
    def run(k, kv_offload, checkpointing="none"):
        torch.use_deterministic_algorithms(True)
        config = AutoConfig.for_model(**tiny_config("qwen2", head_dim=64, hidden_size=256))
        model = new_model(config, torch.bfloat16, seed=3, device="cuda")
        model.set_checkpointing(checkpointing)
        assert model.attention_kernels()["full"] in ("flash-attn-2", "torch-cuda")
        chunks = [[(0, start, start + 16)] for start in range(0, 176, 16)] + [[(1, 0, 4), (2, 0, 9)]]
        plan = handmade_plan(random_sequences([176, 4, 9]), [{0: chunks}], k=k)
        work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256)))
        loss = Executor(model, kv_offload=kv_offload).run(work.ranks[0], work.step.num_target_tokens).loss
        torch.use_deterministic_algorithms(False)
        return loss, {name: value.grad for name, value in model.model.named_parameters()}

    return run


def test_gradients_are_the_same_bits_whatever_k_and_wherever_kv_is(run_step, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    loss, gradients = run_step(1, kv_offload=False)
    for k, kv_offload in ((2, False), (11, False), (1, True), (3, True)):
        other_loss, other = run_step(k, kv_offload)
        assert other_loss == loss
        assert all(torch.equal(other[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("k", [1, 3])
def test_gradients_are_the_same_bits_where_inputs_of_layers_are_on_the_host(run_step, monkeypatch, k):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    loss, gradients = run_step(k, kv_offload=False, checkpointing="full")
    for kv_offload in (False, True):
        other_loss, other = run_step(k, kv_offload, checkpointing="offload")
        assert other_loss == loss
        assert all(torch.equal(other[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("kv_offload", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_gradients_on_a_gpu_are_exact(model_type, kv_offload, tiny_config, handmade_plan, random_sequences):
    changes = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model(**tiny_config(model_type, **(changes if model_type == "gemma3_text" else {})))
    model = new_model(config, torch.float64, seed=1, device="cuda")
    chunks = [[(0, 0, 8)], [(0, 8, 11), (1, 0, 5)], [(3, 0, 3), (0, 11, 23), (5, 0, 1)], [(2, 0, 9), (4, 0, 8)]]
    plan = handmade_plan(random_sequences([23, 5, 9, 3, 8, 1]), [{0: chunks}], k=2)
    assert compare_plan(*plan, model, kv_offload=kv_offload).max_relative_error <= 1e-12


def test_memory_on_the_gpu_does_not_grow_with_a_sequence_whose_kv_is_on_the_host(
    tiny_config, handmade_plan, random_sequences
):
    def peak(length):
        config = AutoConfig.for_model(
            **tiny_config("llama", head_dim=64, hidden_size=256, max_position_embeddings=65536)
        )
        model = new_model(config, torch.bfloat16, seed=0, device="cuda")
        chunks = [[(0, start, start + 1024)] for start in range(0, length, 1024)]
        plan = handmade_plan(random_sequences([length]), [{0: chunks}], k=1)
        work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=65536)))
        torch.cuda.reset_peak_memory_stats()
        Executor(model, kv_offload=True).run(work.ranks[0], work.step.num_target_tokens)
        return torch.cuda.max_memory_allocated()

    assert peak(32768) <= 1.02 * peak(4096)
