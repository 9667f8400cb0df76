"""The kernels for a GPU call what is there as it wants to be called, and say so at the start where it is another.

A stand-in of flash-attn's operators computes on a CPU what these calls ask for; `pytest -m gpu` has the real ones.
"""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.flash import broken_packages
from chunkplan_runtime.attention.function import LayerAttention
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import KERNELS, Kernels, why_wrong
from chunkplan_runtime.kv.pages import PageMemory
from tests.runtime.attention.test_attention import FORMS, WINDOWED, attend_with, plain
from tests.support import flash_stand_in
from tests.support.cudnn_stand_in import CudnnStandIn
from tests.support.flash_stand_in import PUBLISHED, PUBLISHED_4, write_package, write_package_4

_NAMES = (f"flash_stand_in_{number}" for number in itertools.count())

#: What of PyTorch is called: the names of the first arguments, in their order, as torch 2.11 to 2.14 have them.
OPERATORS = {
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        "scale",
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
        "scale",
    ),
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        "scale window_size_left window_size_right",
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused",
        "scale window_size_left window_size_right",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": ("query key value dropout_p is_causal", "scale"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal",
        "scale",
    ),
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a flash-attn in the place of what is installed."""

    def put(write=write_package, **how):
        write(tmp_path, next(_NAMES), **how)
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            monkeypatch.delitem(sys.modules, name)

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


class Recorder:
    """Stands in for an operator of PyTorch: what it was given, by name, and what `does` makes of it."""

    def __init__(self, name, does, calls):
        self._schema, self._does, self._calls = getattr(torch.ops.aten, name).default._schema, does, calls

    def __call__(self, *given, **named):
        arguments = self._schema.arguments
        assert not any(argument.kwarg_only for argument in arguments[: len(given)])
        asked = {argument.name: value for argument, value in zip(arguments, given, strict=False)} | named
        assert set(asked) <= {argument.name for argument in arguments} and len(asked) == len(given) + len(named)
        assert all(argument.name in asked or argument.has_default_value() for argument in arguments)
        self._calls.append({name: value for name, value in asked.items() if value is not None})
        return self._does(asked)


def flash_attention(asked):
    """As PyTorch's copy of FlashAttention-2, in both directions."""
    runs = [asked[name] for name in ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p")]
    how = (*runs, asked["scale"], asked["is_causal"], asked["window_size_left"], asked["window_size_right"])
    tensors = [asked[name] for name in ("query", "key", "value")]
    if "grad_out" not in asked:
        out, lse, debug, _ = flash_stand_in.flash_attn_varlen_forward(*tensors, *how)
        return out, lse, torch.zeros(2, dtype=torch.uint64), debug, debug
    assert asked["rng_state"].dtype == torch.uint64 and asked["rng_state"].shape == (2,)
    gradients = [torch.empty_like(tensor) for tensor in tensors]
    sent = asked["grad_out"], *tensors, asked["out"], asked["logsumexp"]
    flash_stand_in.flash_attn_varlen_backward(*sent, *gradients, *how, 0.0, None, False)
    return tuple(gradients)


@pytest.fixture
def calls(monkeypatch):
    """What PyTorch's operators for a GPU are given. cuDNN gets whatever lengths it can do."""
    found, cudnn = [], CudnnStandIn()
    for name in OPERATORS:
        if not name.endswith(("_for_cpu", "_for_cpu_backward")):
            does = getattr(cudnn, "backward" if "backward" in name else "forward")
            does = does if "cudnn" in name else flash_attention
            monkeypatch.setattr(torch.ops.aten, name, Recorder(name, does, found))
    monkeypatch.setattr("chunkplan_runtime.attention.flash._MULTIPLE", 1)
    return found


@pytest.fixture
def kernel(request, install, calls):
    install(write_package_4 if request.param == "flash-attn-4" else write_package)
    return KERNELS[request.param]


FLASH = ["torch-cuda", "flash-attn-2", "flash-attn-4"]
flash = pytest.mark.parametrize("kernel", FLASH, indirect=True)
with_cudnn = pytest.mark.parametrize("kernel", ["torch-cudnn", *FLASH], indirect=True)

#: One query is what the last part of a sequence may be; a window of no reach is the token itself.
MORE = [
    (1, 90, Form(0.3, causal=False)),
    (1, 90, Form(0.3, causal=True)),
    (1, 90, Form(0.3, causal=False, reach=5)),
    (3, 3, Form(0.3, causal=True, borders=(0, 1, 2, 3))),
    (20, 20, Form(0.3, causal=False, reach=19)),
    (20, 21, Form(0.3, causal=False, reach=0)),
]


@with_cudnn
@pytest.mark.parametrize(("num_queries", "num_keys", "form"), FORMS + WINDOWED + MORE)
@pytest.mark.parametrize("kv_heads", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 0.05)])
def test_what_is_called_is_plain_attention(kernel, num_queries, num_keys, form, kv_heads, dtype, tolerance):
    if (kernel.name.startswith("torch") and form.softcap) or (kernel.name == "torch-cudnn" and form.reach is not None):
        refused = kernel.why_not(torch.device("cuda"), torch.bfloat16, (16, 16), form)
        assert refused in ("it has no softcap", "it has no sliding window")
        return
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 1, 4, num_queries, 16, dtype=dtype)
    key, value = torch.randn(2, 1, num_keys, kv_heads, 16, dtype=dtype).transpose(2, 3)
    out, lse = kernel.forward(query, key, value, form)
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    expected_out, expected_lse = plain(*exact, form)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
    expected = torch.autograd.grad(expected_out, exact, grad_out.double())
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert lse.shape == (1, 4, num_queries)
    for found, wanted in zip((out, lse, *gradients), (expected_out, expected_lse, *expected), strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm().clamp(min=1)


@pytest.mark.parametrize(("form", "window"), [(Form(0.3, True), (-1, 0)), (Form(0.3, False), (-1, -1))])
@pytest.mark.parametrize("reach", [None, 3])
def test_the_operators_are_called_as_pytorch_itself_calls_them(calls, form, window, reach):
    """By `torch.nn.attention.varlen.varlen_attn`, which has the same forms but is not given the LSE of other keys."""
    torch.manual_seed(0)
    borders = (0, 4, 5, 37)
    form = form._replace(reach=reach, borders=borders)
    query, grad_out = torch.randn(2, 1, 4, 37, 16)
    key, value = torch.randn(2, 1, 2, 37, 16)
    kernel = KERNELS["torch-cuda"]
    out, lse = kernel.forward(query, key, value, form)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
    ours = [as_one_says(call) for call in calls]
    calls.clear()
    leaves = [tensor[0].transpose(0, 1).requires_grad_() for tensor in (query, key, value)]
    cu = torch.tensor(borders, dtype=torch.int32)
    how = {"scale": 0.3, "window_size": (-1 if reach is None else reach, window[1]), "enable_gqa": True}
    result = varlen_attn(*leaves, cu, cu, 32, 32, **how)
    its_gradients = torch.autograd.grad(result, leaves, grad_out[0].transpose(0, 1))
    theirs = [as_one_says(call) for call in calls]
    assert [list(call) for call in ours] == [list(call) for call in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in mine.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same and type(value) is type(other[name]), name
    assert torch.equal(out[0].transpose(0, 1), result)
    assert all(torch.equal(one[0].transpose(0, 1), other) for one, other in zip(gradients, its_gradients, strict=True))


def as_one_says(call):
    """By name. A mask that ends at the own key may be said in two ways, and `is_causal` is one of them."""
    said = {**call, "is_causal": call["is_causal"] or call["window_size_right"] == 0}
    return {name: said[name].detach() if isinstance(said[name], torch.Tensor) else said[name] for name in sorted(said)}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_of_this_torch_have_the_arguments_that_are_given(name):
    """In their order, and nothing that has to be given besides."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    positional, named = (words.split() for words in OPERATORS[name])
    assert [argument.name for argument in arguments[: len(positional)]] == positional
    rest = arguments[len(positional) :]
    assert {argument.name for argument in rest} >= set(named)
    assert all(argument.has_default_value() for argument in rest)


@with_cudnn
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])  # nothing to make anew
@given(data=st.data())
def test_attention_in_parts_is_that_of_the_whole_sequence_and_asks_for_no_query_without_a_key(kernel, data):
    """With pages of four ChunkSizes, as the executor has them, and parts of any length up to one."""
    chunk_size = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(1, chunk_size), min_size=2, max_size=16))
    window = data.draw(st.none() | st.integers(1, 60)) if kernel.name != "torch-cudnn" else None
    cuts = list(itertools.accumulate(lengths))
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 4, cuts[-1], 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, cuts[-1], 8, dtype=torch.float64)
    layer = LayerAttention(kernel, 0, 0.3, window)
    out, gradients, _ = attend_with(layer, query, key, value, grad_out, cuts, 4 * chunk_size, PageMemory())
    exact = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected, _ = plain(*exact, Form(0.3, True, None if window is None else window - 1))
    expected.backward(grad_out)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
    for gradient, leaf in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-13)


def called_cudnn(calls, num_queries, num_keys, form):
    """Whether cuDNN's kernel called cuDNN, forward and backward; what it gave is right."""
    torch.manual_seed(0)
    query, grad_out = torch.randn(2, 1, 4, num_queries, 16, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, num_keys, 16, dtype=torch.float64)
    kernel = KERNELS["torch-cudnn"]
    out, lse = kernel.forward(query, key, value, form)
    gradients = kernel.backward(grad_out, query, key, value, out, lse, form)
    exact = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected, _ = plain(*exact, form)
    wanted = torch.autograd.grad(expected, exact, grad_out)
    torch.testing.assert_close((out, *gradients), (expected.detach(), *wanted), rtol=1e-12, atol=1e-13)
    return ["cum_seq_q" not in call for call in calls]


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "form", "is_cudnn"),
    [
        (16, 16, Form(0.3, causal=True), True),
        (16, 16, Form(0.3, causal=True, borders=(0, 16)), True),
        (16, 16, Form(0.3, causal=False), True),
        (8, 32, Form(0.3, causal=False), True),
        (32, 8, Form(0.3, causal=False), True),
        (16, 32, Form(0.3, causal=True), False),
        (16, 16, Form(0.3, causal=True, borders=(0, 8, 16)), False),
        (13, 13, Form(0.3, causal=True), False),
        (13, 16, Form(0.3, causal=False), False),
        (16, 13, Form(0.3, causal=False), False),
        (1, 16, Form(0.3, causal=False), False),
        (16, 1, Form(0.3, causal=False), False),
        (1, 1, Form(0.3, causal=True), False),
        (8, 200, Form(0.3, causal=False), False),  # too many numbers
        (130, 13, Form(0.3, causal=False), True),  # as many FLOPs as a plan is made of
    ],
)
def test_cudnn_gets_lengths_that_come_again_and_long_calls(num_queries, num_keys, form, is_cudnn, calls, monkeypatch):
    monkeypatch.setattr("chunkplan_runtime.attention.flash._MULTIPLE", 8)
    monkeypatch.setattr("chunkplan_runtime.attention.flash._LONG_CALL", 4 * 4 * 16 * 130 * 13)
    monkeypatch.setattr("chunkplan_runtime.attention.flash._MOST_NUMBERS", 4 * 16 * 200)
    assert called_cudnn(calls, num_queries, num_keys, form) == [is_cudnn, is_cudnn]


def test_where_results_have_to_be_the_same_bits_cudnn_gets_nothing(calls):
    torch.use_deterministic_algorithms(True)
    try:
        assert called_cudnn(calls, 16, 16, Form(0.3, causal=True)) == [False, False]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lse_dims", [3, 4])
def test_a_plan_of_cudnn_gets_results_of_one_layout_and_an_lse_as_it_gives_it(lse_dims, monkeypatch):
    """PyTorch finds a plan again by the strides of queries, keys and values alone, and the plan is of the rest too."""
    calls, cudnn = [], CudnnStandIn(lse_dims)
    monkeypatch.setattr("chunkplan_runtime.attention.flash._MULTIPLE", 1)
    for name, does in zip(OPERATORS, (cudnn.forward, cudnn.backward), strict=False):
        monkeypatch.setattr(torch.ops.aten, name, Recorder(name, does, calls))
    kernel, form = KERNELS["torch-cudnn"], Form(0.3, causal=True)
    torch.manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 1, 16, 2, 16, dtype=torch.float64).transpose(2, 3)
    out, lse = kernel.forward(query, key, value, form)
    first = kernel.backward(grad_out, query, key, value, out, lse, form)
    chunk = torch.randn(2, 1, 40, 2, 16, dtype=torch.float64).transpose(2, 3)  # of which the part is a slice
    chunk[:, :, :, 8:24] = torch.stack([grad_out, out])
    of_chunk = torch.randn(1, 2, 40, dtype=torch.float64)
    of_chunk[:, :, 8:24] = lse
    rows = chunk[:, :, :, 8:24]
    for each_grad, each_out, each_lse in [
        (rows[0], rows[1], of_chunk[:, :, 8:24]),
        (grad_out.contiguous(), out.contiguous(), lse),
    ]:
        gradients = kernel.backward(each_grad, query, key, value, each_out, each_lse, form)
        assert all(torch.equal(one, other) for one, other in zip(first, gradients, strict=True))
    assert len(calls) == 4 and len(cudnn.plans) == 1


#: Name, capability, version of cuDNN or what asking for it raises, dtype, size of heads: who serves, and why cuDNN not.
MACHINES = [
    ("H100", (9, 0), 91900, torch.bfloat16, 128, None),
    ("B200", (10, 0), 91900, torch.float16, 64, None),
    ("old cuDNN", (9, 0), 90501, torch.bfloat16, 128, "cuDNN 9.5 is there, needed is 9.10 or newer"),
    ("no cuDNN", (9, 0), None, torch.bfloat16, 128, "this torch has no cuDNN"),
    ("another cuDNN", (9, 0), RuntimeError("cuDNN version incompatibility"), torch.bfloat16, 128, "cannot be called"),
    ("A100", (8, 0), 91900, torch.bfloat16, 128, "it needs compute capability 9.0"),
    ("V100", (7, 0), 91900, torch.float16, 128, "it needs compute capability 9.0"),
    ("large heads", (9, 0), 91900, torch.bfloat16, 256, "it has no kernel for heads of 256"),
    ("odd heads", (9, 0), 91900, torch.bfloat16, 100, "it has no kernel for heads of 100"),
    ("float32", (9, 0), 91900, torch.float32, 128, "it takes bfloat16 and float16, not float32"),
]


@pytest.mark.parametrize(("capability", "version", "dtype", "size", "reason"), [case[1:] for case in MACHINES])
def test_cudnn_serves_what_it_can_and_is_refused_by_name(capability, version, dtype, size, reason, monkeypatch):
    def asked():
        if isinstance(version, RuntimeError):
            raise version
        return version

    monkeypatch.setattr(torch.backends.cudnn, "version", asked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu, form = torch.device("cuda", 0), Form(1.0, True)
    served = "torch-cudnn"
    if reason is not None:
        served = "torch-cuda" if capability >= (8, 0) and size != 100 and dtype != torch.float32 else "reference"
        with pytest.raises(UsageError, match=f"torch-cudnn: .*{reason}"):
            Kernels("torch-cudnn").choose(gpu, dtype, (size, size), form)
    assert Kernels().choose(gpu, dtype, (size, size), form).name == served
    for other in (form._replace(reach=3), form._replace(softcap=5.0)):
        assert Kernels().choose(gpu, dtype, (size, size), other).name != "torch-cudnn"


def test_an_amd_gpu_has_no_cudnn(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    kernel = KERNELS["torch-cudnn"]
    assert kernel.why_not(torch.device("cuda"), torch.bfloat16, (64, 64), Form(1.0, True)) == "this torch has no cuDNN"


@flash
@pytest.mark.parametrize("form", [Form(0.3, causal=False, reach=3), Form(0.3, causal=True)])
def test_more_queries_than_keys_under_a_mask_are_a_mistake_of_ours(kernel, form):
    """FlashAttention-2 would give the first of them nothing, and an LSE of +inf."""
    query, key = torch.randn(1, 4, 13, 16), torch.randn(1, 4, 5, 16)
    with pytest.raises(AssertionError, match="more queries than keys"):
        kernel.forward(query, key, key, form)
    cu = [torch.tensor([0, size], dtype=torch.int32) for size in (13, 5)]
    tensors = (tensor[0].transpose(0, 1) for tensor in (query, key, key))
    _, lse, *_ = flash_stand_in.flash_attn_varlen_forward(
        *tensors, *cu, 13, 5, 0.0, 0.3, form.causal, -1 if form.reach is None else form.reach, -1
    )
    assert lse[:, 0].isinf().all() and lse[:, -1].isfinite().all()


OLD = {name: text.replace("window_size_left", "window_left") for name, text in PUBLISHED.items()}
MORE_TO_GIVE = {name: text.replace(") ->", ", *, int more) ->") for name, text in PUBLISHED.items()}
OTHER_ORDER = {name: text.replace("Tensor q, Tensor k", "Tensor k, Tensor q") for name, text in PUBLISHED.items()}
OLD_4 = {name: text.replace("dow_size_l", "dow_l") for name, text in PUBLISHED_4.items()}
OTHER = "takes other things than it is given"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"version": "2.6.3", "signatures": {}}, "flash-attn 2.6.3 is installed, needed is 2.8 or newer, below 3.0"),
        ({"version": "3.0.0"}, "flash-attn 3.0.0 is installed, needed is 2.8 or newer, below 3.0"),
        ({"version": "main"}, "flash-attn main is installed, needed is 2.8 or newer, below 3.0"),
        ({"signatures": {}}, "has no attribute '_wrapped_flash_attn_varlen_forward')"),
        ({"version": "2.9.0", "signatures": OLD}, f"_wrapped_flash_attn_varlen_forward of flash-attn 2.9.0 {OTHER}"),
        ({"signatures": OTHER_ORDER}, f"_wrapped_flash_attn_varlen_forward of flash-attn 2.8.3 {OTHER}"),
        ({"signatures": MORE_TO_GIVE}, f"_wrapped_flash_attn_varlen_forward of flash-attn 2.8.3 {OTHER}"),
        ({"write": write_package_4, "needs": "none"}, "flash-attn-4 cannot be imported (No module named 'none')"),
        ({"write": write_package_4, "signatures": {}}, "has no attribute '_flash_attn_fwd')"),
        ({"write": write_package_4, "signatures": OLD_4}, f"_flash_attn_fwd of flash-attn-4 4.0.0b36 {OTHER}"),
        (
            {
                "write": write_package_4,
                "signatures": PUBLISHED_4 | {"_flash_attn_bwd": f"more, {PUBLISHED_4['_flash_attn_bwd']}"},
            },
            f"_flash_attn_bwd of flash-attn-4 4.0.0b36 {OTHER}",
        ),
    ],
)
def test_a_flash_attn_that_cannot_be_called_is_left_aside_by_name(how, reason, install, monkeypatch):
    install(**how)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu, form = torch.device("cuda", 0), Form(1.0, True)
    [(name, found)] = broken_packages().items()
    assert found.endswith(reason)
    assert Kernels().choose(gpu, torch.bfloat16, (64, 64), form).name == "torch-cuda"
    with pytest.raises(UsageError, match="no attention kernel can run this model") as raised:
        Kernels(name).choose(gpu, torch.bfloat16, (64, 64), form)
    assert reason in str(raised.value) and raised.value.hint == "--attention auto"


def test_a_flash_attn_4_has_what_cudnn_has_not_on_hopper_and_is_no_flash_attn_2(install, monkeypatch):
    install(write_package_4)
    gpu, form = torch.device("cuda", 0), Form(1.0, True, reach=3, softcap=5.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert broken_packages() == {}
    assert Kernels().choose(gpu, torch.float16, (256, 256), form).name == "flash-attn-4"
    with pytest.raises(UsageError, match="flash-attn-2: the package flash-attn is not installed"):
        Kernels("flash-attn-2").choose(gpu, torch.bfloat16, (64, 64), form)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UsageError, match=r"flash-attn-4: it needs compute capability 9\.0"):
        Kernels("flash-attn-4").choose(gpu, torch.bfloat16, (64, 64), form)


def test_without_a_flash_attn_4_it_is_not_installed(install):
    install()
    assert broken_packages() == {}
    with pytest.raises(UsageError, match="flash-attn-4: the package flash-attn-4 is not installed"):
        Kernels("flash-attn-4").choose(torch.device("cuda"), torch.bfloat16, (64, 64), Form(1.0, True))


@pytest.mark.parametrize("kernel", ["torch-cudnn", *FLASH], indirect=True)
def test_the_trial_at_the_start_of_a_run_is_passed_by_what_is_called(kernel):
    forms = [Form(1.0, True), Form(1.0, True, reach=4095), Form(1.0, True, softcap=20.0)]
    for form in forms if "flash-attn" in kernel.name else forms[: 2 - (kernel.name == "torch-cudnn")]:
        for dtype in (torch.bfloat16, torch.float16):
            assert why_wrong(kernel, torch.device("cpu"), dtype, (16, 16), form) is None


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "AttributeError"])
def test_a_flash_attn_that_cannot_be_imported_is_left_aside_whatever_it_raises(error, install, tmp_path):
    install()
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text(f"raise {error}('built for another torch')\n")
    assert broken_packages() == {"flash-attn-2": "flash-attn cannot be imported (built for another torch)"}


def test_a_flash_attn_that_is_the_known_one_is_chosen(install, monkeypatch):
    install()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert broken_packages() == {}
    assert Kernels().choose(torch.device("cuda", 0), torch.bfloat16, (64, 64), Form(1.0, True)).name == "flash-attn-2"


def test_heads_of_values_of_another_size_are_for_the_reference_kernel_alone(install, monkeypatch):
    install()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for device, dtype in ((torch.device("cuda", 0), torch.bfloat16), (torch.device("cpu"), torch.float32)):
        assert Kernels().choose(device, dtype, (64, 128), Form(1.0, True)).name == "reference"
    with pytest.raises(UsageError, match="heads of the size of its keys, not of 128 with 64"):
        Kernels("torch-cpu").choose(torch.device("cpu"), torch.float32, (64, 128), Form(1.0, True))
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 24)
    kernel = Kernels().choose(query.device, query.dtype, (16, 24), Form(0.3, True))
    out, _ = kernel.forward(query, key, value, Form(0.3, True))
    torch.testing.assert_close(out, plain(query, key, value, Form(0.3, True))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("version", ["2.8.0.post2", "2.8.3"])
def test_the_stand_in_has_the_signatures_of_the_published_source(version, tmp_path):
    """Of the package's source, where it can be fetched: names, order, kinds and defaults."""
    fetch = ["-m", "pip", "download", f"flash-attn=={version}", "--no-deps", "--no-binary", ":all:", "-q"]
    ran = subprocess.run(
        [sys.executable, *fetch, "--no-build-isolation", "-d", str(tmp_path)],
        env={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    sources = list(tmp_path.glob("flash_attn-*.tar.gz"))
    if not sources:
        pytest.skip(f"the source of flash-attn {version} cannot be fetched: {ran.stderr.strip()[-200:]}")
    with tarfile.open(sources[0]) as archive:
        file = archive.extractfile(f"flash_attn-{version}/flash_attn/flash_attn_interface.py")
        tree = ast.parse(file.read())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    wrapped = {name for node in ast.walk(tree) if isinstance(node, ast.Name) for name in [node.id]}
    for name, signature in PUBLISHED.items():
        assert f"_wrapped{name}" in wrapped
        schema = torch._C.parse_schema(f"{name}{signature}")
        arguments = functions[name].args
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
        for published, default, known in zip(arguments.args, defaults, schema.arguments, strict=True):
            assert published.arg == known.name
            kind = ast.unparse(published.annotation).replace("torch.", "").replace("Optional[Tensor]", "Tensor?")
            assert kind == str(known.type).replace("Optional[Tensor]", "Tensor?"), published.arg
            assert (default is not None) == known.has_default_value()
            assert default is None or ast.literal_eval(default) == known.default_value
        returns = ast.unparse(functions[name].returns)
        assert returns.count("Tensor") == len(schema.returns)


@pytest.mark.soak
def test_the_stand_in_of_flash_attn_4_has_the_arguments_of_the_published_package(tmp_path):
    """Where its newest one can be fetched: names that are given, with defaults where they have them here."""
    fetch = ["-m", "pip", "download", "flash-attn-4", "--pre", "--no-deps", "-q", "-d", str(tmp_path)]
    ran = subprocess.run([sys.executable, *fetch], capture_output=True, text=True, timeout=300, check=False)
    wheels = list(tmp_path.glob("flash_attn_4-*.whl"))
    if not wheels:
        pytest.skip(f"flash-attn-4 cannot be fetched: {ran.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        assert "flash_attn/__init__.py" not in archive.namelist()
        tree = ast.parse(archive.read("flash_attn/cute/interface.py"))
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, signature in PUBLISHED_4.items():
        [known] = (node.args for node in ast.parse(f"def it({signature}): ...").body)
        named = [
            {each.arg: at >= len(found.args) - len(found.defaults) for at, each in enumerate(found.args)}
            for found in (functions[name], known)
        ]
        assert named[1].items() <= named[0].items()
        assert all(has_default for each, has_default in named[0].items() if each not in named[1])
