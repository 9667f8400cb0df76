"""`Executor`: the steps of a plan on a model of transformers, for a training loop of one's own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from chunkplan.cost.checkpointing import CHECKPOINTING
from chunkplan.cost.model import Sharding
from chunkplan.domains import FLAG, Domain, number, whole
from chunkplan.errors import UsageError
from chunkplan.quantities import counted
from chunkplan_runtime.attention.interface import ATTENTION, register_attention
from chunkplan_runtime.devices import wide
from chunkplan_runtime.distributed.job import Job, refuse_differences
from chunkplan_runtime.distributed.sharding import Shards
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.loss import entropies, readings
from chunkplan_runtime.execution.losses import Distillation, check_loss, find_loss
from chunkplan_runtime.execution.step_loss import StepLoss
from chunkplan_runtime.feed.scores import Scores
from chunkplan_runtime.feed.stream import PlanStream, RankWork, StepWork, open_plan
from chunkplan_runtime.models.checks import check_config, check_plan, check_prefixes, max_positions, plan_stream
from chunkplan_runtime.models.model import CausalLM, for_chunks
from chunkplan_runtime.models.parts import has_adapters, whole_of
from chunkplan_runtime.proof.prove import check_exact
from chunkplan_runtime.training.log_probs import TokenLogProbs, attached, in_order, named, plan_work, weights_of
from chunkplan_runtime.training.setup import fingerprint
from chunkplan_runtime.training.train_step import StepExecutor

#: Options of `plan_step` that calls of `log_probs` may have: a call is one rank's, on one stage.
_OPTIONS_OF_CALLS = frozenset(("share_prefixes", "split", "tail_sharing", "packing", "k_by_length"))

#: What of a LoRA config would make adapters look at other tokens, or layers share an index.
_LORA_FEATURES = ("alora_invocation_tokens", "layer_replication")

#: What weights may be in: gradients in narrower dtypes need loss scaling.
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Executor:
    """Runs the steps of a plan on a causal language model, on one process: `Executor.from_model(model)` makes one.

    After `step` the gradients in `.grad` are those of whole sequences; optimizer, schedule and clipping are the
    caller's. Between steps the model is an ordinary one of transformers. What it computes in is what it is in then:
    its dtype and device, `model.train()` or `model.eval()`, and a `torch.autocast` around a call.
    """

    def __init__(self, model: CausalLM, *, seed: int = 0, kv_offload: bool = False, router_loss: str = "none") -> None:
        self._model = model
        self._how: Any = {"seed": seed, "kv_offload": kv_offload, "router_loss": router_loss}
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        self._plans: set[str] = set()
        self._num_calls = 0
        #: Of the loss of the last step, by name.
        self.metrics: Mapping[str, float] = {}
        self.join(Job())

    def join(self, job: Job, sharding: Sharding = "optimizer") -> None:
        """Share steps with the other processes of `job` from now on, over which the model is sharded.

        Gradients are then those of the rows that each has. Raises UsageError: weights differ, or see `Shards`.
        """
        shards, exchanges = None, job.groups.exchanges if job.groups else None
        if job.groups and job.groups.replicas:
            refuse_differences(job.all_gather_object({"weights": fingerprint(self._model, self._model, Job())}))
            shards = Shards(self._model, job.groups.replicas, master_weights=False, sharding=sharding)
            self._model = shards.model
        self.job, self._shards = job, shards
        ranks = RankExecutor(replace(self._model, call=self._call), exchanges=exchanges, **self._how)
        self._steps = StepExecutor(ranks, shards, job)

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        checkpointing: str = "none",
        kv_offload: bool = False,
        router_loss: str | None = None,
        seed: int = 0,
    ) -> Executor:
        """An executor for a model that `AutoModelForCausalLM` has loaded, or that peft has put LoRA adapters around.

        `checkpointing`: the level of activation checkpointing. `kv_offload`: keys and values of split sequences lie in
        host memory. `router_loss`: what the load-balancing loss of a mixture of experts is over, "batch", "sequence" or
        "none"; None: what the model's config asks for. `seed`: of dropout.

        Raises:
            UsageError: gradients are not known to be exact for the model, or it has no such level of checkpointing.
        """
        check_argument("checkpointing", checkpointing, CHECKPOINTING, "full")
        check_argument("seed", seed, whole(), 0)
        check_argument("kv_offload", kv_offload, FLAG, True)
        base, where = _causal_lm(model)
        scope = check_exact(base.config, where, router_loss=router_loss)
        register_attention()
        found = for_chunks(base)
        try:
            found.set_checkpointing(checkpointing)
        except UsageError as error:
            hint = re.sub(r"--checkpointing (\S+)", r'checkpointing="\1"', error.hint)
            raise UsageError(error.message.removeprefix("--"), hint=hint) from None
        return cls(found, seed=seed, kv_offload=kv_offload, router_loss=scope)

    def stream(self, plan: str | Path, analysis: str | Path | None = None) -> PlanStream:
        """The steps of the plan in a folder, for this model; `analysis`: where that is, if not where the plan says.

        Raises:
            UsageError: there is no such plan, it is for several pipeline stages, or the model does not take it: a token
                is not in its vocabulary, or a sequence has more positions than it has.
            DataError: plan or analysis are damaged or do not belong together.
        """
        pin_memory = self._model.device.type == "cuda"
        how: Any = {"router_loss": self._how["router_loss"], "pin_memory": pin_memory}
        return plan_stream(self._model.config, *open_plan(plan, analysis), **how)

    def step(
        self,
        work: StepWork,
        loss: str | StepLoss | Distillation | None = None,
        *,
        with_reference: bool = False,
        reference: Scores | None = None,
    ) -> float:
        """Run a step forward and backward, all ranks in `work`; adds to `.grad` and returns the loss.

        That is the `loss` that the plan is for, as a rule the mean cross-entropy of the step's target tokens, of those
        ranks the sum of their shares; one by its name (`chunkplan.config.losses`); or one of your own of all target
        tokens of the step. With it comes the load-balancing loss of routers where there is one. A loss that needs a
        reference takes it from `reference`, else from the data, else from the model without the adapters of peft, which
        `with_reference` asks for if the loss is your own. Then `metrics` has what it says beside its value. A step
        without targets teaches nothing: it adds no gradients, and its loss is 0.

        Raises:
            UsageError: the step is not one for this model, or there would be no gradients, or none to trust. If it
                comes from within a chunk, or is another error, there are gradients of a part of the step.
            DataError: the plan's actions are not in an order that gives exact gradients.
        """
        self._check(work)
        found = find_loss(work.plan.config.loss if loss is None else loss)
        check_loss(found, work.plan, None if work.samples is None else work.samples.kind, reference)
        has_gradients = torch.is_grad_enabled()
        if not has_gradients or not any(each.requires_grad for each in self._model.model.parameters()):
            why = "all weights are frozen" if has_gradients else "gradients are switched off around it"
            hint = "set `requires_grad` of some" if has_gradients else "leave out torch.no_grad or inference_mode there"
            raise UsageError(f"a step would teach nothing: {why}", hint=f"{hint}; `evaluate` gives the loss alone")
        if not work.step.num_target_tokens:
            return 0.0
        with self._at_work():
            how: Any = {"with_reference": with_reference, "reference": reference}
            losses, weighed = self._steps.run_by(work, found, **how)
            if self._shards:
                self._steps.ranks.doing = f"step {work.step.step}, reducing gradients"
                self._shards.reduce_gradients()
        value = weighed.value if weighed else self._sum(rank.loss for rank in losses)
        self.metrics = weighed.metrics if weighed else {}
        of_routers = self._steps.router_loss
        return value if of_routers is None else value + self._sum([of_routers])

    def evaluate(self, work: StepWork, loss: str | StepLoss | None = None, *, reference: Scores | None = None) -> float:
        """The mean cross-entropy of a step's target tokens by forwards alone, or `loss`, see `step`.

        `model.eval()` turns dropout off.

        Raises:
            UsageError, DataError: as `step`.
        """
        self._check(work)
        found = None if loss is None else find_loss(loss)
        with self._at_work():
            weighed = self._steps.weigh_by(work, found, reference=reference)
            losses = [] if weighed else self._steps.evaluate(work)
            if self._shards:
                self._shards.free()
        if weighed:
            self.metrics = weighed.metrics
            return weighed.value
        return self._sum(rank.loss for rank in losses)

    def log_probs(
        self,
        sequences: Sequence[Tensor],
        targets: Sequence[Tensor],
        *,
        chunk_size: int,
        k: int = 1,
        temperature: float = 1.0,
        with_more: bool = False,
        **options: Any,
    ) -> TokenLogProbs:
        """Log-probabilities and entropies of target tokens, planned and run in chunks, that a loss may be made of.

        `sequences` are token ids [length] and `targets` bool [length]; a first token is never predicted. Within
        torch.no_grad there are forwards alone. Else a backward through the result runs the chunks forward and backward
        and adds to `.grad` of weights itself, in the modes that the model is in then; torch.autograd.grad finds
        nothing. Logits are divided by `temperature`. `with_more`: the rest of `TokenLogProbs`. `options`: others of
        `plan_step`, such as share_prefixes=True, with which tokens that sequences begin with alike run once. Dropout
        draws anew in every call.

        Raises:
            UsageError: these are not token ids and targets, the model does not take them, options do not go together,
                the executor has joined others, or it has a load-balancing loss.
        """
        check_argument("temperature", temperature, number(lambda given: 0 < given < math.inf, "a number above 0"), 1.0)
        if self._shards or self._how["router_loss"] != "none":
            told = "a load-balancing loss" if self._shards is None else "shares of processes"
            hint = 'make it with Executor.from_model(model, router_loss="none"), and reduce gradients yourself'
            raise UsageError(f"log_probs of an executor with {told}", hint=hint)
        _check_weights(self._model.model)
        device = self._model.device
        if unknown := options.keys() - _OPTIONS_OF_CALLS:
            hint = f"these are the options: {', '.join(sorted(_OPTIONS_OF_CALLS))}"
            raise UsageError(f"log_probs has no option {min(unknown)!r}", hint=hint)
        if len(sequences) != len(targets):
            told = f"{counted(len(sequences), 'sequence')} with targets of {len(targets)}"
            raise UsageError(told, hint="give targets of each sequence")
        kept = [each for each in zip(sequences, targets, strict=True) if each[1][1:].any()]
        if not kept:
            nothing = torch.zeros(0, 5 if with_more else 2, dtype=wide(self._model.dtype), device=device)
            return attached(named(nothing), self._zero_gradients) if torch.is_grad_enabled() else named(nothing)
        options |= {"cap": chunk_size, "k": k}
        work, num_targets = plan_work(kept, self._model.vocab_size, self._num_calls, **options)
        self._num_calls += 1
        if options.get("share_prefixes"):
            check_prefixes(self._model.config, None, "leave share_prefixes out")
        if not self._model.is_causal and any(chunk.group_id is not None for chunk in work.chunks.values()):
            hint = 'give a chunk_size of the longest sequence, and split="none"'
            raise UsageError("in this model tokens see those that come after them, and a sequence is split", hint=hint)
        self._check_tokens(work, "give ids of the model's tokenizer, and no longer sequences")
        ranks = self._steps.ranks
        with self._at_work(temperature):
            values = ranks.token_losses(work, readings if with_more else entropies, what="log-probabilities")
        found = in_order(work, values, device)
        if not torch.is_grad_enabled():
            return found
        how: Any = {"dtype": torch.get_autocast_dtype(device.type), "enabled": torch.is_autocast_enabled(device.type)}

        def backward(*gradients: Tensor | None) -> None:
            [weights] = weights_of(work, values, *gradients)
            with torch.enable_grad(), torch.autocast(device.type, **how), self._at_work(temperature):
                ranks.run(work, num_targets, weights=weights)

        return attached(found, backward)

    def _zero_gradients(self, *_: object) -> None:
        """Give weights that have no gradient one of zeros, as a loss without tokens has it in autograd."""
        for weight in self._model.model.parameters():
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    def _sum(self, losses: Iterable[float]) -> float:
        """The sum of losses of all processes, in their order."""
        return sum((each for own in self.job.all_gather_object([*losses]) for each in own), 0.0)

    def _check(self, work: object) -> None:
        """Refuse what is no step or is of a stream that was made for another model, and a model that was changed."""
        if not isinstance(work, StepWork):
            hint = "`for work in executor.stream(PLAN):` gives steps"
            raise UsageError(f"expected a step of a plan, not {type(work).__name__}", hint=hint)
        _check_weights(self._model.model)
        if work.plan.content_hash not in self._plans:
            check_plan(self._model.config, work.plan, self._how["router_loss"])
            self._plans.add(work.plan.content_hash)
        for rank in work.ranks:
            self._check_tokens(rank, "take steps from `executor.stream(PLAN)`, which says what to change")

    def _check_tokens(self, work: RankWork, hint: str) -> None:
        config = self._model.config
        most = max_positions(config) or math.inf
        for tensors in work.tensors.values():
            token, position = int(tensors.input_ids.max()), int(tensors.position_ids.max())
            if token >= config.vocab_size or position >= most:
                raise UsageError(
                    f"token id {token:,} and position {position:,}, the model takes those below "
                    f"{config.vocab_size:,} and {most:,}",
                    where=f"step {work.step}",
                    hint=hint,
                )

    @contextmanager
    def _at_work(self, temperature: float = 1.0) -> Iterator[None]:
        """Within the block the model attends as chunks do, and its forwards are in the autocast that is around it.

        Logits are divided by `temperature`.
        """
        config, device = self._model.config, self._model.device.type
        self._autocast = nullcontext
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            if dtype == torch.float16:
                hint = f'use torch.autocast("{device}", dtype=torch.bfloat16)'
                raise UsageError("autocast in float16 needs loss scaling, which this runtime has not", hint=hint)
            # Of weights that are gathered and given back, what autocast keeps of a cast would be of an earlier one.
            self._autocast = partial(torch.autocast, device, dtype=dtype, cache_enabled=self._shards is None)
        attention = config._attn_implementation
        # Not through `set_attn_implementation`, which would fetch a kernel of the Hub anew whenever it is put back.
        config._attn_implementation, self._model.current.temperature = ATTENTION, temperature
        try:
            activity = self.job.reporting(lambda: self._steps.ranks.activity, lambda: None)
            with torch.inference_mode(False), torch.autocast(device, enabled=False), activity:
                yield
        except RuntimeError as error:
            dtypes = sorted({str(each.dtype) for each in self._model.model.parameters()})
            if type(error) is not RuntimeError or len(dtypes) == 1 or "dtype" not in str(error):
                raise
            raise UsageError(
                f"weights in {' and '.join(dtypes)} do not go together here: {error}",
                hint="call it within torch.autocast, or give all weights one dtype: `model.to(torch.float32)`",
            ) from error
        finally:
            config._attn_implementation, self._model.current.temperature = attention, 1.0
            self._model.current.context = None

    def _call(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Run decoder or head, each in an autocast of its own.

        Backwards have to be outside of it; and autocast keeps cast weights while it lasts, of which those of a forward
        without gradients must not serve one with.
        """
        with self._autocast():
            return self._model.call(do, *arguments)


def check_argument(name: str, value: object, domain: Domain, example: object) -> None:
    """Refuse an argument that is not what it may be."""
    if not domain.holds(value):
        raise UsageError(f"{name} is {value!r}, expected {domain.expected}", hint=f"for example {name}={example!r}")


def _causal_lm(model: Any) -> tuple[Any, str]:
    """The causal LM in `model`, itself or below peft's adapters, and its name; refused where chunks get it wrong."""
    base: Any = whole_of(model)
    for name, adapter in model.peft_config.items() if has_adapters(model) else ():
        features = [feature for feature in _LORA_FEATURES if getattr(adapter, feature, None)]
        if adapter.peft_type != "LORA" or features:
            kind = ", ".join([str(adapter.peft_type.value), *features])
            raise UsageError(
                f"adapter {name!r} is one that chunked gradients are not known to be exact for: {kind}",
                hint="use plain LoRA (peft.LoraConfig)",
            )
    where = getattr(getattr(base, "config", None), "name_or_path", "") or type(base).__name__
    is_model = isinstance(base, PreTrainedModel)
    if not is_model:
        hint = "give what AutoModelForCausalLM has loaded, not what torch.compile or DistributedDataParallel made of it"
        raise UsageError("not a model of transformers", where=where, hint=hint)
    config = base.config
    check_config(config, where, router_loss=True)
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    # Llama 4 takes itself for its decoder.
    if head is None or (base.get_decoder() is base and not hasattr(base, "lm_head")):
        raise UsageError("no head that predicts tokens", where=where, hint="load it with AutoModelForCausalLM")
    rows = min(len(each.weight) for each in (embeddings, head) if getattr(each, "weight", None) is not None)
    if rows < config.vocab_size:
        raise UsageError(
            f"the config's vocabulary has {config.vocab_size:,}, the model {rows:,}",
            where=where,
            hint="model.resize_token_embeddings(N) changes both",
        )
    _check_weights(base, where)
    return base, where


def _check_weights(model: Any, where: str | None = None) -> None:
    """Refuse weights whose gradients could not be trusted, or that are not all in one place."""
    weights = list(model.parameters())
    narrow = sorted({str(each.dtype) for each in weights if each.is_floating_point() and each.dtype not in _DTYPES})
    if narrow:
        raise UsageError(
            f"weights in {', '.join(narrow)} need loss scaling, which this runtime has not",
            where=where,
            hint="load the model with dtype=torch.float32, and run steps within torch.autocast in torch.bfloat16",
        )
    devices = sorted({str(each.device) for each in weights})
    if len(devices) > 1 or devices == ["meta"]:
        raise UsageError(
            f"the weights are on {' and '.join(devices)}, expected one device, such as cpu or cuda",
            where=where,
            hint="load the model without device_map, outside of torch.device, and move it: `model.to(DEVICE)`",
        )
