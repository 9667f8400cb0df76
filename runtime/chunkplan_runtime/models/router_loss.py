"""The load-balancing loss of a mixture of experts, whose gradient is that of a whole step, or of whole sequences.

With f_e how often tokens choose expert e and P_e the mean probability that its router gives it, the loss is a multiple
of the sum of f_e P_e (Fedus et al., arXiv 2101.03961), over a batch or, as of DeepSeek-V3, a sequence; docs/runtime.md
has both. f has no gradient, and P is a mean of tokens: once f is known, each token by itself has the gradient of the
whole. It is added in the backward of each router, so that it is the same wherever a graph is cut.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.output_capturing import OutputRecorder

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import ChunkContext
from chunkplan_runtime.devices import wide
from chunkplan_runtime.models import ROUTER_LOSSES
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.parts import decoder_of, whole_of

#: What a process has counted: tokens by expert, and tokens, each once for every router that it passes.
Counts = tuple[list[int], int]

_HINT = 'use `--router-loss none`, router_loss="none" in Python, or set output_router_logits to false'

_KNOWN_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")


def router_loss_scope(config: Any, asked: str | None, where: str) -> str:
    """The scope that f is counted over: "batch", "sequence", or "none" for no such loss; None: the config's.

    Raises UsageError where there is no such scope, or transformers computes no such loss for the model type.
    """
    if asked not in (None, *ROUTER_LOSSES):
        raise UsageError(f"router_loss is {asked!r}", hint=f"use one of: {', '.join(ROUTER_LOSSES)}")
    scope = asked or ("batch" if getattr(config, "output_router_logits", False) else "none")
    if scope == "none":
        return scope
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    compute = getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None) if kind else None
    if compute is None:
        what = f"transformers computes no load-balancing loss for model type {config.model_type!r}"
        raise UsageError(what, where=where, hint=_HINT)
    if tuple(inspect.signature(compute).parameters) != _KNOWN_ARGUMENTS:
        what = f"the load-balancing loss of model type {config.model_type!r} is one of its own"
        raise UsageError(what, where=where, hint=_HINT)
    return scope


def softmax_of(rows: Tensor) -> Tensor:
    """Probabilities of experts [num_tokens, num_experts], in at least float32, of logits of a router."""
    return rows.to(wide(rows.dtype)).softmax(-1)


def load_balancing(
    head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of a router, a `ChunkLoss` of its logits: `head` is softmax, `labels` multiply probabilities."""
    probabilities = head(hidden)
    terms = labels.to(probabilities.dtype) * probabilities
    losses = terms.sum(-1)
    gradient = (terms - probabilities * losses[:, None]) * weights[:, None]
    return losses, gradient.to(hidden.dtype)


class RouterLoss:
    """Adds the gradient of the load-balancing loss over `scope` in the backwards of a step, of a model or of a stage.

    Raises UsageError where the loss would have no weight.
    """

    def __init__(self, model: CausalLM, scope: str) -> None:
        self.scope = scope
        self._is_training = self._is_counting = False
        self._num_tokens = 1
        #: By router and sequence in flight, of each part by its first token, tokens by expert [num_experts].
        self._of_sequences: defaultdict[tuple[int, tuple[int, int | None]], dict[int, Tensor]] = defaultdict(dict)
        #: Of a step: tokens by expert [num_experts], and over how many rows; what probabilities are multiplied by.
        self._counted: tuple[Tensor | int, int] = 0, 0
        self._shares: Tensor | None = None
        self._value: Tensor | None = None
        #: By context: of each token the index of its span [num_tokens]; of each span its weight [num_spans].
        self._weights: WeakIdKeyDictionary = WeakIdKeyDictionary()
        if scope == "none":
            return
        whole = whole_of(model.model)
        self._weight: Any = getattr(whole, "router_aux_loss_coef", getattr(whole, "aux_loss_coef", None))
        if not self._weight:
            raise UsageError(f"router_aux_loss_coef is {self._weight}, with a load-balancing loss", hint=_HINT)
        self._top_k: int = whole.num_experts_per_tok
        decoders = [decoder_of(each) for each in dict.fromkeys(part.model for part in model.by_stage)]
        for number, (module, index) in enumerate(chain.from_iterable(map(_routers, decoders))):
            module.register_forward_hook(partial(self._after_router, number, index))

    def begin_step(
        self,
        num_tokens: int,
        run_forwards: Callable[[], object],
        gather: Callable[[Counts], Sequence[Counts]] = lambda own: [own],
    ) -> None:
        """Begin a step of so many tokens on all processes; of the whole batch, count the tokens of each expert first.

        `run_forwards` runs all chunks of this process forward. `gather` gives what all processes have counted.
        """
        self._num_tokens, self._value = max(num_tokens, 1), None
        if self.scope != "batch":
            return
        self._counted, self._is_counting = (0, 0), True
        try:
            run_forwards()
        finally:
            self._is_counting = False
        counted, num_rows = self._counted
        own: list[int] = [] if isinstance(counted, int) else counted.tolist()
        gathered = [each for each in gather((own, num_rows)) if each[1]]
        if gathered:
            num_rows = sum(rows for _, rows in gathered)
            counts = torch.tensor([counts for counts, _ in gathered], dtype=torch.float64).sum(0)  # [num_experts]
            self._shares = counts * len(counts) / num_rows / num_rows

    def begin_run(self, *, with_gradients: bool) -> None:
        """Forget what is in flight, of another rank or of a run that raised; without gradients nothing is added."""
        self._of_sequences.clear()
        self._is_training = with_gradients

    @property
    def value(self) -> float:
        """The loss added by this process in the step so far: of routers that a backward has come through."""
        return 0.0 if self._value is None else self._value.item()

    def _after_router(self, router: int, index: int, module: Any, _: Any, output: Any) -> Any:
        """A forward hook: count, and pass on what the router gives so that its backward adds the gradient."""
        current = getattr(module, "chunkplan", None)
        outputs = list(output) if isinstance(output, tuple) else [output]
        logits = outputs[index]
        if current is None or current.router_loss is not self or current.context is None or logits is None:
            return None
        if not (self._is_training or self._is_counting):
            return None
        context: ChunkContext = current.context
        counts = None
        if self._is_counting or self.scope == "sequence":
            counts = self._count(logits.detach(), context)
            if self._is_counting:
                before, rows = self._counted
                tokens = sum(span.stop - span.start for span in context.spans if span.sequence_id >= 0)
                self._counted = before + counts.sum(0), rows + tokens
                return None
            for own, span in zip(counts, context.spans, strict=True):
                if span.is_split:  # the same whenever it runs
                    self._of_sequences[router, span.occurrence][span.start] = own
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return None
        # All that has a gradient goes through, as most models go on with something else than the logits.
        passed = [place for place, each in enumerate(outputs) if isinstance(each, Tensor) and each.requires_grad]
        passed.sort(key=lambda place: place != index)  # its logits first
        apply: Callable[..., tuple[Tensor, ...]] = _Balanced.apply
        found = apply(partial(self._gradient, router, context, counts), *(outputs[place] for place in passed))
        for place, each in zip(passed, found, strict=True):
            outputs[place] = each
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]

    def _count(self, logits: Tensor, context: ChunkContext) -> Tensor:
        """The number of tokens of each span that choose each expert: [num_spans, num_experts], of padding none."""
        rows = logits.reshape(-1, logits.shape[-1])  # [num_tokens, num_experts]
        chosen = softmax_of(rows).topk(self._top_k).indices  # [num_tokens, top_k]
        hits = torch.zeros_like(rows, dtype=torch.int64).scatter_(1, chosen, 1)
        indices, weights = self._weights_of(context, rows.device)
        counts = hits.new_zeros(len(context.spans), rows.shape[1]).index_add_(0, indices, hits)
        return counts * (weights > 0)[:, None]

    def _gradient(self, router: int, context: ChunkContext, counts: Tensor | None, logits: Tensor) -> Tensor:
        """Gradient of the loss for `logits` [..., num_experts]; its value is added up."""
        rows = logits.reshape(-1, logits.shape[-1])
        if counts is None:
            assert self._shares is not None, "a step has begun"
            self._shares = self._shares.to(rows.device)
            by_span = self._shares.expand(len(context.spans), -1)  # [num_spans, num_experts]
        else:
            of_sequences = [
                sum(self._of_sequences[router, span.occurrence].values(), torch.zeros_like(own))
                if span.is_split
                else own
                for own, span in zip(counts, context.spans, strict=True)
            ]
            by_span = torch.stack(of_sequences).double() * (rows.shape[1] / self._top_k / self._num_tokens)
            for span in context.spans:
                if span.is_split and span.start == 0:  # the last backward of its sequence
                    self._of_sequences.pop((router, span.occurrence), None)
        indices, weights = self._weights_of(context, rows.device)
        weights = weights[indices]
        losses, gradient = load_balancing(softmax_of, rows, by_span[indices], weights)
        value = losses.double() @ weights
        self._value = value if self._value is None else self._value + value
        return gradient.view_as(logits)

    def _weights_of(self, context: ChunkContext, device: torch.device) -> tuple[Tensor, Tensor]:
        """Implements `_weights`, kept for recomputation, which may call torch no more often than the first run."""
        if context not in self._weights:
            spans, is_mean = context.spans, self.scope == "sequence"
            lengths = torch.tensor([span.stop - span.start for span in spans])
            indices = torch.arange(len(spans)).repeat_interleave(lengths)
            weights = [self._weight * (each.sequence_id >= 0) / (each.length if is_mean else 1) for each in spans]
            by_span = torch.tensor(weights, dtype=torch.float64)
            self._weights[context] = indices.to(device, non_blocking=True), by_span.to(device, non_blocking=True)
        found: tuple[Tensor, Tensor] = self._weights[context]
        return found


class _Balanced(torch.autograd.Function):
    """Passes on what a router gives; in the backward `gradient` of its logits is added to theirs."""

    @staticmethod
    def forward(ctx: Any, gradient: Callable[[Tensor], Tensor], logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(logits)
        ctx.gradient = gradient
        return tuple(each.clone() for each in (logits, *others))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return None, gradients[0] + ctx.gradient(logits), *gradients[1:]


def _routers(decoder: Any) -> Iterator[tuple[nn.Module, int]]:
    """The modules that give router logits, as transformers records them, and at which place of what they return."""
    found = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders: list[OutputRecorder] = found if isinstance(found, list) else [found]
    for name, module in decoder.named_modules():
        for recorder in recorders:
            if not isinstance(module, recorder.target_class):
                continue
            if recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}.":
                yield module, recorder.index
