"""Trainers of TRL whose log-probabilities are computed in chunks: DPO, KTO, GRPO and RLOO with memory of chunks.

All of them ask a model for log-probabilities in one way, its forward with `fused_lm_head=True`; here this goes through
`Executor.log_probs`. Losses, rewards, generation, logging and everything else stay TRL's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed import all_reduce
from transformers import Trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from chunkplan import PlanConfig
from chunkplan.errors import UsageError
from chunkplan_runtime.distributed.job import Job, refuse_differences
from chunkplan_runtime.feed.stream import NO_TARGET
from chunkplan_runtime.models.model import for_chunks
from chunkplan_runtime.models.parts import whole_of
from chunkplan_runtime.training.chunk_trainer import refuse_stepping_in_backward
from chunkplan_runtime.training.executor import Executor
from chunkplan_runtime.training.log_probs import TokenLogProbs
from chunkplan_runtime.training.setup import fingerprint

#: Trainers whose log-probabilities are known to go through here, and no other use of the model in a loss.
TRAINERS = (DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer)

#: Settings of these trainers that would have no effect, or a wrong one: what to do instead.
_REFUSED = {
    "activation_offloading": "activations are those of chunks; with_chunks(..., kv_offload=True) has keys and values on"
    " the host",
    "cast_lm_head_to_fp32": "leave it out: softmax is computed in float32 here",
    "deepspeed": "leave it out: memory is that of chunks, and processes average gradients",
    "fp16": "use bf16=True: losses are not scaled here",
    "fsdp": "leave it out: memory is that of chunks, and processes average gradients",
    "neftune_noise_alpha": "a chunk that is recomputed would get other noise; leave it out",
    "parallelism_config": "every process has sequences of its own; leave it out",
    "torch_compile": "chunks call the modules of the model, which would stay as they are; leave it out",
    "use_liger_kernel": "leave it out: logits are never held whole here either",
}

#: What the forward of a model may be given here beside tokens, as it changes nothing.
_NEUTRAL = ("fused_lm_head", "use_cache", "return_dict")


def with_chunks(
    trainer: type[Trainer], *, chunk_size: int, k: int = 1, kv_offload: bool = False, share_prefixes: bool = False
) -> type[Any]:
    """A subclass of a trainer of TRL that runs its model in chunks of at most `chunk_size` tokens.

    Of a sequence's chunks the last `k` hold activations at a time. `kv_offload`: keys and values of split sequences lie
    in host memory. `share_prefixes`: what sequences of a micro-batch begin with alike runs once. Generation runs as
    ever. Of several processes each has a whole model; they average gradients. Raises UsageError: it is not one of
    `TRAINERS`, an argument is not what it may be; and when a trainer is made, of settings and models that this cannot
    honour.
    """
    if not issubclass(trainer, TRAINERS):
        hint = f"give one of {', '.join(each.__name__ for each in TRAINERS)}; SFT has ChunkTrainer"
        raise UsageError(f"{trainer.__name__} is no trainer whose log-probabilities are known here", hint=hint)
    sizes: Any = {"chunk_size": chunk_size, "k": k, "share_prefixes": share_prefixes}
    PlanConfig(**sizes)  # raises
    chosen = {"_sizes": sizes, "_kv_offload": kv_offload, "_executors": None}
    return type(trainer.__name__, (_InChunks, trainer), chosen)


class _InChunks(Trainer):
    """The part of a trainer that gives its models another way to log-probabilities, and averages gradients."""

    _sizes: dict[str, int | bool]
    _kv_offload: bool
    _executors: list[Executor] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._install()

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._install()  # within the trainer's own `__init__`
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _install(self) -> None:
        """Make the forwards of model and reference model go through executors; once."""
        if self._executors is not None:
            return
        _check_settings(self)
        self._executors = []
        # Now, as an autocast around the forward that is put in place here would be entered within itself, for the head.
        self.accelerator.prepare_model(self.model)
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                how: Any = {"kv_offload": self._kv_offload, "seed": self.args.seed + self.args.process_index}
                executor = Executor.from_model(model, router_loss="none", **how)
                self._executors.append(executor)
                _take_over(self, executor, whole_of(model), with_more=model is self.model)
        if self.args.world_size > 1:
            own = for_chunks(whole_of(self.model))
            refuse_differences(gather_object([{"weights": fingerprint(own, own, Job())}]))

    def create_accelerator_and_postprocess(self) -> None:
        """Keep accelerate from wrapping a model: its wrapper would reduce gradients in the backward of every chunk."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train as the trainer does; the last of a step's micro-batches averages gradients over processes."""
        loss = super().training_step(*args, **kwargs)
        if self.args.world_size > 1 and self.accelerator.sync_gradients:
            for weight in cast(Any, self.model).parameters():
                if weight.requires_grad:
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    all_reduce(weight.grad.div_(self.args.world_size))
        return loss


def _take_over(trainer: Any, executor: Executor, model: Any, *, with_more: bool) -> None:
    """Make the forward of a model that is asked for log-probabilities give what `executor` computes of them."""
    before = model.forward
    temperature = getattr(trainer, "temperature", 1.0)
    how: Any = {"temperature": temperature, "with_more": with_more, **trainer._sizes}

    @wraps(type(model).forward)
    def forward(_: object, *args: Any, **given: Any) -> Any:
        if not given.get("fused_lm_head"):
            return before(*args, **given)
        with trainer.accelerator.autocast():
            return _output(lambda *tokens: executor.log_probs(*tokens, **how), **given)

    model.forward = MethodType(forward, model)


def _output(
    log_probs: Callable[[list[Tensor], list[Tensor]], TokenLogProbs],
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    **others: Any,
) -> FusedCausalLMOutput:
    """The output of TRL's own fused head, for padded rows [rows, tokens]; raises UsageError of what it cannot take."""
    for name, value in others.items():
        if name not in _NEUTRAL and value is not None and value is not False:
            hint = "train a language model on text alone, without router losses"
            raise UsageError(f"the trainer gives the model {name}, which chunks do not take", hint=hint)
    is_there, is_target = attention_mask.cpu() != 0, labels.cpu() != NO_TARGET
    follows = torch.zeros_like(is_there)
    follows[:, 1:] = is_there[:, 1:] & is_there[:, :-1]
    # Each row is one run of tokens between padding; of what comes after a gap, positions would be others.
    gaps = (is_there & ~follows).sum(1) > 1
    wrong = gaps | (is_target & ~follows)[:, 1:].any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        told = "a gap in its attention mask" if gaps[row] else "a target that no token of it comes before"
        hint = "give rows with padding at their ends alone, and a prompt of one token at least"
        raise UsageError(f"row {row} of a batch has {told}", hint=hint)
    ids, is_target = input_ids.cpu(), is_target & follows
    rows = range(len(ids))
    found = log_probs([ids[row][is_there[row]] for row in rows], [is_target[row][is_there[row]] for row in rows])
    mask = is_target[:, 1:].to(labels.device)

    def padded(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.new_zeros(mask.shape).masked_scatter(mask, values)

    return FusedCausalLMOutput(
        log_probs=padded(found.log_probs),
        entropy=padded(found.entropies),
        log_sum_sq_probs=padded(found.log_sum_squares),
        mean_logits=padded(found.mean_logits),
        is_top1=padded(found.is_top),
        label_mask=mask,
    )


def _check_settings(trainer: Any) -> None:
    """Refuse settings that would have no effect, or a wrong one; raises UsageError."""
    args = trainer.args
    refuse_stepping_in_backward(args)
    for name, hint in _REFUSED.items():
        if value := getattr(args, name, None):
            raise UsageError(f"{name}={value!r} cannot be done in chunks", hint=hint)
    if trainer.compute_metrics is not None:
        raise UsageError("compute_metrics cannot be done in chunks", hint="leave it out: it gets logits of whole rows")
    if trainer.aux_loss_enabled:
        hint = "set router_aux_loss_coef=0.0; `chunkplan train` has router losses in chunks"
        raise UsageError(f"router_aux_loss_coef={trainer.router_aux_loss_coef} cannot be done in chunks", hint=hint)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:  # asked for by `accelerate launch`
        raise UsageError("deepspeed or FSDP is configured for accelerate", hint=_REFUSED["fsdp"])
