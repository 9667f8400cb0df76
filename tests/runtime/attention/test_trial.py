"""A kernel is tried where it is to run: one that is wrong or fails there is left out by name, the next one taken."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from chunkplan.cost.hardware import AttentionRates
from chunkplan.errors import UsageError
from chunkplan_runtime.attention.kernel import Form
from chunkplan_runtime.attention.kernels import KERNELS, Kernels, why_wrong
from chunkplan_runtime.attention.reference import ReferenceKernel
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import new_model
from chunkplan_runtime.proof.prove import random_sequences, work_of

CPU = torch.device("cpu")
FORMS = [Form(1.0, True), Form(1.0, True, reach=4095), Form(1.0, True, reach=3), Form(1.0, True, softcap=20.0)]


class Damaged(ReferenceKernel):
    """Plain attention with `damage` done to it."""

    name = "damaged"

    def __init__(self, damage, squares_only=False):
        self.damage, self.squares_only = damage, squares_only

    def forward(self, query, key, value, form):
        if self.damage == "fails":
            raise RuntimeError("no plan of cuDNN supports this\nand more")
        if self.damage == "aligned at the start" and form.causal and form.borders is None:
            key, value = key[:, :, : query.size(2)], value[:, :, : query.size(2)]
        if self.damage == "sees all":
            form = form._replace(causal=False)
        if self.damage == "no borders":
            form = form._replace(borders=None)
        if self.damage == "no window":
            form = form._replace(reach=None)
        out, lse = super().forward(query, key, value, form)
        if self.damage == "another scale":
            out = super().forward(query, key, value, form._replace(scale=1.2 * form.scale))[0]
        if self.damage == "no number":
            out[0, 0, 3, 0] = torch.nan
        return out, lse * 1.4427 if self.damage == "a logarithm to base 2" else lse

    def backward(self, grad_out, query, key, value, out, lse, form):
        if self.damage == "an LSE of its own":
            out, lse = self.forward(query, key, value, form)
        found = super().backward(grad_out, query, key, value, out, lse, form)
        return tuple(found[place] for place in (0, 2, 1)) if self.damage == "gradients exchanged" else found


@pytest.mark.parametrize("squares_only", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak)])
def test_a_kernel_that_is_right_stays(form, dtype, squares_only):
    assert why_wrong(Damaged(None, squares_only), CPU, dtype, (32, 32), form) is None
    assert why_wrong(Damaged(None, squares_only), CPU, dtype, (32, 16), form) is None


@pytest.mark.parametrize(
    "damage",
    [
        *("aligned at the start", "sees all", "no borders", "no window", "another scale", "no number"),
        *("a logarithm to base 2", "an LSE of its own", "gradients exchanged"),
    ],
)
def test_a_kernel_that_is_wrong_in_any_way_is_found_out(damage):
    form = FORMS[1] if damage == "no window" else FORMS[0]
    assert why_wrong(Damaged(damage), CPU, torch.bfloat16, (32, 32), form).startswith("it is wrong on this device, by ")


def test_a_kernel_that_is_left_out_is_named_and_the_next_one_taken():
    kernels, case = Kernels(), (CPU, torch.bfloat16, (32, 32), FORMS[0])
    kernels._candidates = [Damaged("fails"), *kernels._candidates]
    assert kernels.choose(*case).name == "torch-cpu"
    reason = "it fails on this device (no plan of cuDNN supports this)"
    assert kernels.left_out == {"damaged": reason}
    kernels = Kernels("torch-cuda")
    kernels._candidates = [Damaged("sees all")]
    with pytest.raises(UsageError, match=r"damaged: it is wrong on this device, by [\d.]+ of the result") as raised:
        kernels.choose(*case)
    assert raised.value.hint == "--attention auto"


@pytest.mark.parametrize("has_links", [False, True])
def test_a_kernel_that_makes_plans_in_a_step_is_left_out_where_stages_wait_for_each_other(has_links):
    kernels, planning = Kernels(has_links=has_links), Damaged(None)
    planning.name = "torch-cudnn"
    kernels._candidates = [planning, *kernels._candidates]
    chosen = kernels.choose(CPU, torch.bfloat16, (32, 32), FORMS[0])
    assert chosen.name == ("torch-cpu" if has_links else "torch-cudnn")
    assert [*kernels.left_out] == (["torch-cudnn"] if has_links else [])


@pytest.mark.parametrize("model_type", ["gemma2", "gemma4_text"])
def test_kernels_of_all_layers_are_chosen_and_so_tried_before_a_step(model_type, tiny_config):
    """Gemma 4 has heads of other sizes in layers without a window."""
    changes = {"num_hidden_layers": 6, "sliding_window": 7, "hidden_size_per_layer_input": 0, "global_head_dim": 16}
    model = new_model(AutoConfig.for_model(**tiny_config(model_type, **changes)), torch.float32, seed=1)
    chosen = {*model.kernels._chosen}
    RankExecutor(model).run(work_of(random_sequences(97), 1), 50)
    assert {*model.kernels._chosen} == chosen and len(chosen) == 2


def test_kernels_that_a_profile_has_rates_of_are_taken_by_these():
    def rates(kernel, blocks):
        others = dict.fromkeys(("forward_squares", "backward_squares", "ramp_queries"), 1.0)
        return AttentionRates(kernel=kernel, head_size=64, forward_blocks=blocks, backward_blocks=blocks, **others)

    def order(*given):
        return [kernel.name for kernel in Kernels(rates=[rates(*each) for each in given])._candidates]

    assert order() == order(("torch-cuda", 9.0)) == list(KERNELS)
    measured = order(("torch-cuda", 2.0), ("torch-cuda", 9.0), ("flash-attn-4", 1.0), ("torch-cudnn", 3.0))
    assert measured == ["torch-cudnn", "torch-cuda", "flash-attn-2", "flash-attn-4", "torch-cpu", "reference"]
    assert [kernel.name for kernel in Kernels("torch-cuda", [rates("torch-cudnn", 1.0)])._candidates] == ["torch-cuda"]
