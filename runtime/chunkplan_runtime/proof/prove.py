"""Whether chunked execution is exact for a model: by the error that a small one of its class has.

The small model (`tiny`) runs sequences whole, with transformers' own plain attention, and in chunks: packed beside one
another, split, and both in one chunk, with one chunk of a sequence in flight and with two. All of it is in float64, on
the CPU. Compared are the loss and the gradient of every weight. Nothing is taken for granted: a model is accepted or
refused by what is measured.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from threading import BrokenBarrierError, Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig
from transformers.utils import logging

from chunkplan.errors import UsageError
from chunkplan_runtime.attention.context import Current
from chunkplan_runtime.distributed.stages import cut_stage
from chunkplan_runtime.domains import NO_ROUTER_LOSS
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.checks import MODEL_TYPES
from chunkplan_runtime.models.model import CausalLM, new_model
from chunkplan_runtime.models.modes import evaluate_in_float64
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.models.tiny import num_weights, tiny_document, unknown_numbers
from chunkplan_runtime.proof.work import ORDERS, Sequence, ThreadGather, ThreadLinks, random_sequences, work_of

#: What rounding in float64 leaves far below and any mistake far above.
TOLERANCE = 1e-10

#: A gradient this small beside that of all weights is zero but for rounding (a query's where there is one key).
_VANISHING = 1e-13

#: More weights than these, and the small model is none.
_MOST_WEIGHTS = 20_000_000


@dataclass(frozen=True)
class ModelProof:
    """How far chunked execution of a small model is off.

    Attributes:
        error: of the worst gradient, ||g - g_whole|| / ||g_whole||; or of the loss.
        where: the weight with that error, and what it was run with.
    """

    error: float
    where: str

    @property
    def holds(self) -> bool:
        """Whether it is exact but for rounding; not where the error is no number."""
        return self.error <= TOLERANCE


class UnprovedError(Exception):
    """No small model could be run: the reason."""


def prove(config: Any, *, num_stages: int = 1) -> ModelProof:
    """Compare a small model of the class of `config` whole and in chunks, the latter on `num_stages` stages (1 or 2).

    Raises:
        UnprovedError: the small model cannot be built, or does not run in chunks.
    """
    torch_state, num_threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are too small for more
    level = logging.get_verbosity()
    logging.set_verbosity(40)  # errors
    try:
        return _prove(config, num_stages)
    except UnprovedError:
        raise
    except Exception as error:  # whatever the code of a model raises is a reason to refuse it
        raise UnprovedError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    finally:
        logging.set_verbosity(level)
        torch.random.set_rng_state(torch_state)
        torch.set_num_threads(num_threads)


def _prove(config: Any, num_stages: int) -> ModelProof:
    document = tiny_document(config.to_dict())
    if unknown := unknown_numbers(document):
        what = " and ".join(f"{name} {document.get(name, '')}".strip() for name in unknown[:3])
        raise UnprovedError(f"what {what} changes in long sequences is not known")
    tiny = AutoConfig.for_model(**document)
    if (found := num_weights(tiny)) > _MOST_WEIGHTS:
        raise UnprovedError(f"a small model of its class has {found:,} weights still")
    model = new_model(tiny, torch.float64, seed=0)
    model.model.double()  # some weights are float32 whatever is asked for
    spread_weights(model.model)
    sequences = random_sequences(tiny.vocab_size)
    num_targets = sum(int(each.target.sum()) for each in sequences)
    scope = router_loss_scope(tiny, None, "the small model")

    def chunked(k: int, num_stages: int) -> _Run:
        return _chunked(model, sequences, num_targets, k, num_stages, scope)

    with evaluate_in_float64(model.model):
        is_noisy = draws_noise(model, sequences[0].tokens)
        model.model.train(not is_noisy)
        whole = _whole(model, sequences, num_targets, with_router_loss=scope != NO_ROUTER_LOSS)
        errors = [_compared(chunked(k, num_stages), whole, f"K {k}") for k in ORDERS]
        if is_noisy:
            model.model.train()  # on one stage: two threads would draw from one generator
            errors.append(_compared(chunked(1, 1), chunked(2, 1), "K 1 beside K 2, with noise"))
    return max(errors, key=lambda proof: (proof.error != proof.error, proof.error))


def draws_noise(model: CausalLM, tokens: Tensor) -> bool:
    """Whether a model takes random numbers when it is trained."""
    before = torch.random.get_rng_state()
    with _plain_attention(model), torch.no_grad():
        model.model(tokens[None].long(), use_cache=False)
    return not torch.equal(before, torch.random.get_rng_state())


def spread_weights(model: torch.nn.Module) -> None:
    """Make the weights of a new model so large that everything that it computes matters, norms' among them."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)


@dataclass(frozen=True)
class _Run:
    loss: float
    gradients: dict[str, Tensor]


def _whole(model: CausalLM, sequences: list[Sequence], num_targets: int, *, with_router_loss: bool) -> _Run:
    """Plain training of whole sequences: nothing here is shared with chunked execution but the weights."""
    total = 0.0
    with _plain_attention(model):
        for tokens, target in sequences:
            total += train_whole(model, tokens, target, num_targets)
        if with_router_loss:
            total += train_routers(model, [tokens for tokens, _ in sequences])
    return _Run(total, take_gradients(model))


@contextmanager
def _plain_attention(model: CausalLM) -> Iterator[None]:
    """Within the block the model attends as transformers' own plain code does."""
    attention = model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    yield
    model.model.set_attn_implementation(attention)


def train_routers(model: CausalLM, sequences: list[Tensor]) -> float:
    """Run sequences as one padded batch by transformers alone: its load-balancing loss, with its weight."""
    tokens = pad_sequence([each.long() for each in sequences], batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in sequences], batch_first=True).long()
    label = torch.full_like(tokens, -100)
    label[0, 1] = tokens[0, 1]
    out, without = (
        model.model(tokens, attention_mask=mask, labels=label, use_cache=False, output_router_logits=with_loss)
        for with_loss in (True, False)
    )
    loss = out.loss - without.loss
    torch.autograd.backward(loss)
    return float(loss.item())


def train_whole(model: CausalLM, tokens: Tensor, target: Tensor, num_targets: int) -> float:
    """Run a sequence [num_tokens] forward and backward by transformers alone: its part of the loss of a step."""
    logits = model.model(tokens[None].long(), use_cache=False).logits[0]
    predicted = target[1:]
    loss = F.cross_entropy(logits[:-1][predicted], tokens[1:][predicted].long(), reduction="sum") / num_targets
    torch.autograd.backward(loss)
    return loss.item()


def _chunked(model: CausalLM, sequences: list[Sequence], num_targets: int, k: int, num_stages: int, scope: str) -> _Run:
    work = work_of(sequences, k)
    gather = ThreadGather(num_stages)

    def run_step(own: CausalLM, links: Any = None) -> float:
        executor = RankExecutor(own, links=links, router_loss=scope)
        num_tokens = sum(len(each.tokens) for each in sequences)
        executor.router_loss.begin_step(num_tokens, lambda: executor.evaluate(work, what="counting"), gather)
        return executor.run(work, num_targets).loss + executor.router_loss.value

    if num_stages == 1:
        return _Run(run_step(model), take_gradients(model))
    queues: dict[str, SimpleQueue[Any]] = {"inputs": SimpleQueue(), "gradients": SimpleQueue()}
    num_layers = len(model.own_layers)
    cuts = (range(num_layers // 2), range(num_layers // 2, num_layers))
    stages = []
    for stage in range(2):
        copied = replace(model, model=deepcopy(model.model), current=Current())
        stages.append(cut_stage(copied, cuts, RankLayout(pp=2, process=stage)))
    losses: list[float] = [0.0, 0.0]
    failed: list[BaseException] = []

    def run(stage: int) -> None:
        links = ThreadLinks(queues)
        try:
            with evaluate_in_float64(stages[stage].model):
                losses[stage] = run_step(stages[stage], links)
        except BaseException as error:
            is_own = str(error) != "the other stage failed" and not isinstance(error, BrokenBarrierError)
            failed.insert(0 if is_own else len(failed), error)
            links.close()
            gather.close()

    threads = [Thread(target=run, args=(stage,)) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    gradients: dict[str, Tensor] = {}
    for own in stages:
        for name, gradient in take_gradients(own).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return _Run(sum(losses), gradients)


def take_gradients(model: CausalLM) -> dict[str, Tensor]:
    """The gradients of a model by parameter, zeros where there is none; the model is left without."""
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.model.named_parameters()
        if parameter.requires_grad
    }
    model.model.zero_grad(set_to_none=True)
    return gradients


def vanishing_gradients(reference: dict[str, Tensor], share: float = 1e-14) -> list[str]:
    """The parameters whose gradient is zero but for rounding, at most a `share` of all together; or no number."""
    norms = {name: gradient.norm().item() for name, gradient in reference.items()}
    overall = math.hypot(*norms.values())
    return [name for name, norm in norms.items() if not norm > share * overall]  # NaN too


def relative_errors(
    gradients: dict[str, Tensor], reference: dict[str, Tensor], vanishing: Collection[str]
) -> dict[str, float]:
    """Give ||g - g_ref|| / ||g_ref|| of every parameter; of `vanishing` ones, over the norm of all together."""
    norms = {name: gradient.norm().item() for name, gradient in reference.items()}
    overall = math.hypot(*norms.values())
    return {
        name: (gradients[name] - reference[name]).norm().item() / (overall if name in vanishing else norm)
        for name, norm in norms.items()
    }


def _compared(found: _Run, whole: _Run, how: str) -> ModelProof:
    missing = {name: torch.zeros_like(each) for name, each in whole.gradients.items() if name not in found.gradients}
    vanishing = vanishing_gradients(whole.gradients, _VANISHING)
    errors = {"the loss": abs(found.loss - whole.loss) / abs(whole.loss)}
    errors |= relative_errors(found.gradients | missing, whole.gradients, vanishing)
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return ModelProof(errors[worst], f"{worst}, {how}")


_HINT = "docs/models.md has the models that are known to be exact, and why others are not"


def exact_router_loss(config: Any, asked: str | None, where: str, num_stages: int = 1) -> str:
    """What the load-balancing loss of a model is over, see `router_loss_scope`; refused if it is not exact with that.

    Raises:
        UsageError: see `router_loss_scope` and `check_exact`.
    """
    scope = router_loss_scope(config, asked, where)
    check_exact(config, where, num_stages=num_stages, router_loss=scope != NO_ROUTER_LOSS)
    return scope


def check_exact(config: Any, where: str, *, num_stages: int = 1, router_loss: bool = False) -> None:
    """Refuse a model for which chunked execution is not exact, on one stage or on several.

    With `router_loss` the load-balancing loss of its routers is proved too.

    Types that the tests of this project hold are let through, and what was proved before is not proved again, for the
    same features and versions.

    Raises:
        UsageError: with the error that was measured, or why none could be.
    """
    if config.model_type in MODEL_TYPES:
        return
    if bool(getattr(config, "output_router_logits", False)) != router_loss:
        config = copy.copy(config)
        config.output_router_logits = router_loss
    stages = min(num_stages, 2)
    on = " on pipeline stages" if stages > 1 else ""
    try:
        proof = proof_of(config, stages)
    except UnprovedError as error:
        raise UsageError(
            f"chunked gradients cannot be proved exact for model type {config.model_type!r}{on}: {error}",
            where=where,
            hint=_HINT,
        ) from error
    if not proof.holds:
        raise UsageError(
            f"chunked gradients of model type {config.model_type!r}{on} are off by {proof.error:.1e} "
            f"({proof.where}), as a small model of its class shows",
            where=where,
            hint=_HINT,
        )


def proof_of(config: Any, num_stages: int) -> ModelProof:
    """What is found for a model, or was found before for one of the same features with the same versions.

    Raises:
        UnprovedError: see `prove`.
    """
    proof = known_proof(config, num_stages)
    if proof is None:
        proof = prove(config, num_stages=num_stages)
        _keep(config, num_stages, proof)
    return proof


def known_proof(config: Any, num_stages: int) -> ModelProof | None:
    """What was found for a model of the same features with the same versions; None if nothing was."""
    try:
        return ModelProof(**json.loads(_place(config, num_stages).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(config: Any, num_stages: int, proof: ModelProof) -> None:
    """Write it down; where that is not possible, it is proved again the next time."""
    place = _place(config, num_stages)
    written = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(asdict(proof)), encoding="utf-8")
        written.replace(place)
    except OSError:
        return


def _place(config: Any, num_stages: int) -> Path:
    described = {"features": tiny_document(config.to_dict()), "stages": num_stages, "with": _versions()}
    key = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    cached = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cached) / "chunkplan" / "proofs" / f"{key}.json"


@cache
def _versions() -> dict[str, str]:
    """Of what the result depends on; of the runtime itself the content of its files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    own = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"torch": version("torch"), "transformers": version("transformers"), "runtime": own}
