"""What needs a CUDA GPU: exact gradients, the same bits with KV on the host, its kernels against plain attention.

The most telling come first, and a model is made once: with all that is imported it is less than a minute. Nothing of
the planner is needed.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from chunkplan.cost.activations import activation_bytes_per_token
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import shape_of_config
from chunkplan.cost.optimizers import tokens_at_once
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import KERNELS
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.loss import cross_entropy
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from chunkplan_runtime.models.fused import fuse
from chunkplan_runtime.models.model import Head, new_model
from chunkplan_runtime.parity import compare_plan
from chunkplan_runtime.training.optimizer import TrainedWeights
from tests.support.alive import held_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch with CUDA"),
]

DEVICE = torch.device("cuda")

#: Queries, keys, and what is asked.
FORMS = [
    (512, 512, Form(0.1, causal=True)),
    (512, 1536, Form(0.1, causal=False)),
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


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_gradients_on_a_gpu_are_exact(model_type, tiny_config, handmade_plan, random_sequences):
    """With keys and values on the GPU and in host memory, and with attention that chunks keep in either."""
    changes = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model(**tiny_config(model_type, **(changes if model_type == "gemma3_text" else {})))
    model = new_model(config, torch.float64, seed=1, device=DEVICE)
    chunks = [[(0, 0, 8)], [(0, 8, 11), (1, 0, 5)], [(3, 0, 3), (0, 11, 23), (5, 0, 1)], [(2, 0, 9), (4, 0, 8)]]
    for kv_offload, k, kept in (
        (False, 2, None),
        (True, 2, None),
        (False, 1, {0: "gpu", 1: "host"}),
        (True, 1, {0: "host"}),
    ):
        plan = handmade_plan(random_sequences([23, 5, 9, 3, 8, 1]), [{0: chunks}], k=k, kept=kept)
        assert compare_plan(*plan, model, kv_offload=kv_offload).max_relative_error <= 1e-12


@pytest.fixture(scope="module")
def model(tiny_config):
    """One for all tests in bfloat16, with as many positions as any of them needs."""
    sizes = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 1 << 16}
    made = new_model(AutoConfig.for_model(**tiny_config("qwen2", **sizes)), torch.bfloat16, seed=3, device=DEVICE)
    assert made.attention_kernels()["full"] != "reference" and not made.kernels.left_out
    return made


@pytest.fixture
def run_step(model, handmade_plan, random_sequences, monkeypatch):
    """`run(k, kv_offload, checkpointing)` -> loss and gradients, by deterministic kernels."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chunks = [[(0, start, start + 16)] for start in range(0, 96, 16)] + [[(1, 0, 4), (2, 0, 9)]]

    def run(k, kv_offload, checkpointing="none"):
        plan = handmade_plan(random_sequences([96, 4, 9]), [{0: chunks}], k=k)
        work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=256, prefetch=0)))
        model.set_checkpointing(checkpointing)
        model.model.zero_grad(set_to_none=True)
        torch.use_deterministic_algorithms(True)
        try:
            loss = RankExecutor(model, kv_offload=kv_offload).run(work.ranks[0], work.step.num_target_tokens).loss
        finally:
            torch.use_deterministic_algorithms(False)
            model.set_checkpointing("none")
        return loss, {name: value.grad for name, value in model.model.named_parameters()}

    return run


@pytest.mark.parametrize(
    ("checkpointing", "others"),
    [
        ("none", [(3, False, "none"), (6, False, "none"), (1, True, "none"), (3, True, "none")]),
        ("full", [(1, False, "offload"), (3, True, "offload")]),
    ],
    ids=["keys", "inputs-of-layers"],
)
def test_gradients_are_the_same_bits_whatever_k_and_whatever_is_on_the_host(run_step, checkpointing, others):
    loss, gradients = run_step(1, False, checkpointing)
    for other in others:
        other_loss, found = run_step(*other)
        assert other_loss == loss, other
        assert all(torch.equal(found[name], gradients[name]) for name in gradients), other


@pytest.mark.parametrize("kind", ["linear", "transposed"])
def test_products_are_added_to_master_weights_without_being_rounded(kind):
    """They are added in place, by products in float32."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 160) if kind == "linear" else Conv1D(160, 96)
    layer.to(DEVICE, torch.bfloat16)
    master = TrainedWeights(layer, master_weights=True).tensors["weight"]
    expected = torch.zeros(160, 96, dtype=torch.float64, device=DEVICE)
    for num_tokens in (33, 512, 1):
        x = torch.randn(1, num_tokens, 96, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        gradient = torch.randn(1, num_tokens, 160, dtype=torch.bfloat16, device=DEVICE)
        before = master.grad
        layer(x).backward(gradient)
        assert before is None or master.grad is before
        expected += gradient[0].double().mT @ x[0].detach().double()
    assert layer.weight.grad is None and master.grad.dtype == torch.float32
    found = master.grad.double() if kind == "linear" else master.grad.double().mT
    assert float((found - expected).norm() / expected.norm()) < 1e-6  # in bfloat16 it were 2e-3


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (8, 128)], ids=["grouped-64", "128"])
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("reference", "torch-cpu")])
def test_a_kernel_is_plain_attention_in_every_form(name, kv_heads, head_dim):
    dtype, kernel = torch.bfloat16, KERNELS[name]
    torch.manual_seed(0)
    refused = {}
    for num_queries, num_keys, form in FORMS:
        if (reason := kernel.why_not(DEVICE, dtype, (head_dim, head_dim), form)) is not None:
            refused[form] = reason
            continue
        query, grad_out = torch.randn(2, 1, 8, num_queries, head_dim, dtype=dtype, device=DEVICE)
        key, value = torch.randn(2, 1, num_keys, kv_heads, head_dim, dtype=dtype, device=DEVICE).transpose(2, 3)
        out, lse = kernel.forward(query, key, value, form)
        gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
        exact = [tensor.double() for tensor in (query, key, value)]
        expected = KERNELS["reference"].forward(*exact, form)
        expected_gradients = KERNELS["reference"].backward(grad_out.double(), *exact, *expected, form)
        for found, wanted in zip((out, lse, *gradients), (*expected, *expected_gradients), strict=True):
            assert (found.double() - wanted).norm() <= 0.01 * wanted.norm(), form
    if len(refused) == len(FORMS):
        pytest.skip(refused[FORMS[0][2]])


def test_memory_on_the_gpu_does_not_grow_with_a_sequence_whose_kv_is_on_the_host(
    model, handmade_plan, random_sequences
):
    def peak(length):
        chunks = [[(0, start, start + 1024)] for start in range(0, length, 1024)]
        plan = handmade_plan(random_sequences([length]), [{0: chunks}], k=1)
        work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=1 << 16, prefetch=0)))
        model.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        RankExecutor(model, kv_offload=True).run(work.ranks[0], work.step.num_target_tokens)
        return torch.cuda.max_memory_allocated()

    short = peak(8192)  # whose first page is closed, as that of any longer one
    assert peak(24576) <= 1.02 * short


def test_attention_that_is_kept_on_the_host_is_one_layer_on_the_gpu(tiny_config, handmade_plan, random_sequences):
    """Between two chunks, of out and log-sum-exp: the last layer's, until others leave."""

    def held(kept):
        sizes = {"head_dim": 64, "hidden_size": 256, "num_hidden_layers": 8, "max_position_embeddings": 1 << 16}
        model = new_model(AutoConfig.for_model(**tiny_config("qwen2", **sizes)), torch.bfloat16, seed=3, device=DEVICE)
        chunks = [[(0, start, start + 1024)] for start in range(0, 4096, 1024)]
        plan = handmade_plan(random_sequences([4096]), [{0: chunks}], k=1, kept=kept)
        work = next(iter(PlanStream(*open_plan(*plan), vocab_size=97, max_positions=1 << 16, prefetch=0)))
        now = []

        def meet(action):
            now.append(torch.cuda.memory_allocated())

        RankExecutor(model).run(work.ranks[0], work.step.num_target_tokens, collectives=meet)
        return now[3]  # before the forward of the last chunk

    of_layer = 1024 * 4 * (64 * 2 + 4)
    without, on_host, on_gpu = (held(dict.fromkeys(range(3), where)) for where in ("", "host", "gpu"))
    assert on_host - without <= 1.1 * of_layer
    assert on_gpu - without == pytest.approx(3 * 8 * of_layer, rel=0.1)


def test_fused_norms_of_torch_hold_on_a_gpu_what_the_planner_counts(tiny_config):
    sizes = {"hidden_size": 128, "intermediate_size": 336, "head_dim": 32}
    few, more = (
        new_model(
            AutoConfig.for_model(**tiny_config(**sizes, num_hidden_layers=layers)), torch.bfloat16, 1, device=DEVICE
        )
        for layers in (2, 4)
    )
    for made in (few, more):
        fuse(made.model, "torch", DEVICE)
    shape = shape_of_config(tiny_config(**sizes), "a test")
    predicted = activation_bytes_per_token(CostModel(shape=shape, fused_kernels="torch"), shape.kinds[0])
    measured = (held_bytes(more) - held_bytes(few)) / 2
    assert measured <= predicted <= 1.1 * measured


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_compiled_loss_holds_logits_and_their_gradient_alone(smoothing):
    vocab_size, num_tokens = 152064, 2048
    head = torch.nn.Linear(64, vocab_size, bias=False, device=DEVICE, dtype=torch.bfloat16)
    TrainedWeights(head, master_weights=True)
    hidden = torch.randn(num_tokens, 64, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(vocab_size, (num_tokens,), dtype=torch.int32)
    weights = torch.full((num_tokens,), 0.5, device=DEVICE)
    found = []
    for compiled in (False, True):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            of_head = Head(head, vocab_size, compiled)
            found.append(cross_entropy(smoothing)(of_head, hidden, labels, weights))
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 4.2 * vocab_size * min(num_tokens, tokens_at_once(vocab_size, 4))
    for one, other in zip(found[0], found[-1], strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-2
