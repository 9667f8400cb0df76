"""The proof that chunked execution is exact for a model: the error of a small one of its class (`models.tiny`).

It runs sequences whole, with transformers' own plain attention, and in chunks: packed beside one another, split, and
both in one chunk, with one chunk of a sequence in flight and with two, in float64 on the CPU. Compared are the loss and
the gradient of every weight: a model is accepted or refused by what is measured.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig
from transformers.utils import logging

from chunkplan.errors import UsageError
from chunkplan.files.writing import whole_file
from chunkplan.planfile.plan import Action, Chunk, Segment
from chunkplan_runtime.attention.context import CurrentChunk
from chunkplan_runtime.distributed.stages import cut_stage
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.links import Links
from chunkplan_runtime.feed.stream import NO_TARGET, ChunkTensors, RankWork, shifted_labels
from chunkplan_runtime.layout import RankLayout, Span
from chunkplan_runtime.models.checks import MODEL_TYPES
from chunkplan_runtime.models.model import CausalLM, new_model
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.models.tiny import num_weights, tiny_document, unknown_numbers

#: What rounding in float64 leaves far below and any mistake far above; beside all weights' gradients a vanishing one.
TOLERANCE, _VANISHING = 1e-10, 1e-13

_MOST_WEIGHTS = 20_000_000  # of a small model

#: What each chunk has of the sequences that a proof runs, (sequence, start, stop): whole ones, parts of split ones, and
#: both. The longest sequence goes far beyond the window of a small model.
CHUNKS: tuple[tuple[tuple[int, int, int], ...], ...]
CHUNKS = ((0, 0, 9), (1, 0, 7)), ((2, 0, 16),), ((2, 16, 32),), ((2, 32, 41), (3, 0, 5)), ((4, 0, 12),), ((4, 12, 23),)

#: By K, the actions of every stage; and where some of the chunks that run forward twice keep what attention gave.
ORDERS = {1: "F0 B0 f1 f2 F3 B3 R2 B2 R1 B1 f4 F5 B5 R4 B4", 2: "F0 B0 f1 F2 F3 B3 B2 R1 B1 F4 F5 B5 B4"}
KEPT_ATTENTION = {2: "gpu", 4: "host"}
_OPS = {"F": "forward", "f": "forward_kv", "R": "recompute", "B": "backward"}


@dataclass(frozen=True)
class ModelProof:
    """The proof for a model: the relative `error` of a small one's worst gradient, or of its loss.

    `where`: the weight with that error, and what it was run with.
    """

    error: float
    where: str

    @property
    def holds(self) -> bool:
        """True if it is exact but for rounding; not where the error is no number."""
        return self.error <= TOLERANCE


class UnprovedError(Exception):
    """No small model could be run: the reason."""


class Sequence(NamedTuple):
    """Tokens of a sequence, int32 [num_tokens], and which of them are targets, bool [num_tokens]."""

    tokens: Tensor
    target: Tensor


#: The loss of a run, and its gradients by weight.
_Run = tuple[float, dict[str, Tensor]]


def prove(config: Any, *, num_stages: int = 1) -> ModelProof:
    """Compare a small model of the class of `config` whole and in chunks, on `num_stages` stages (1 or 2).

    Raises UnprovedError where the small model cannot be built, or does not run in chunks.
    """
    num_threads, level = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)  # tensors are too small for more
    logging.set_verbosity(40)  # errors
    try:
        with torch.random.fork_rng(devices=[]):
            return _prove(config, num_stages)
    except UnprovedError:
        raise
    except Exception as error:  # whatever the code of a model raises is a reason to refuse it
        raise UnprovedError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    finally:
        logging.set_verbosity(level)
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
    with evaluate_in_float64(model.model):
        is_noisy = draws_noise(model, sequences[0].tokens)
        model.model.train(not is_noisy)
        whole = _whole(model, sequences, num_targets, with_router_loss=scope != "none")
        own = model if num_stages == 1 else _two_stages(model)
        proofs = [_compared(_chunked(own, sequences, num_targets, k, scope), whole, f"K {k}") for k in ORDERS]
        if is_noisy:
            model.model.train()
            one, two = (_chunked(model, sequences, num_targets, k, scope) for k in ORDERS)
            proofs.append(_compared(one, two, "K 1 beside K 2, with noise"))
    return max(proofs, key=lambda proof: (proof.error != proof.error, proof.error))


def _whole(model: CausalLM, sequences: list[Sequence], num_targets: int, *, with_router_loss: bool) -> _Run:
    """Plain training of whole sequences: nothing here is shared with chunked execution but the weights."""
    with _plain_attention(model):
        total = sum(train_whole(model, tokens, target, num_targets) for tokens, target in sequences)
        if with_router_loss:
            total += train_routers(model, [tokens for tokens, _ in sequences])
    return total, take_gradients(model)


def _chunked(model: CausalLM, sequences: list[Sequence], num_targets: int, k: int, scope: str) -> _Run:
    """The same in chunks, on all stages that the model has."""
    work = work_of(sequences, k, len(model.by_stage))
    links = Links(torch.zeros(1, 1, dtype=torch.float64), range(len(model.by_stage)), {})
    executor = RankExecutor(model, links=links, router_loss=scope)
    num_tokens = sum(len(each.tokens) for each in sequences)
    executor.router_loss.begin_step(num_tokens, lambda: executor.evaluate(work, what="counting"))
    loss = executor.run(work, num_targets).loss + executor.router_loss.value
    of_parts = [take_gradients(part) for part in model.by_stage]
    names = dict.fromkeys(name for each in of_parts for name in each)
    return loss, {name: torch.stack([each[name] for each in of_parts if name in each]).sum(0) for name in names}


def _two_stages(model: CausalLM) -> CausalLM:
    """A model with two stages, cut out of two copies: what one stage has, the other lacks."""
    num_layers, current = len(model.own_layers), CurrentChunk()
    layers = (range(num_layers // 2), range(num_layers // 2, num_layers))
    copies = [replace(model, model=deepcopy(model.model), current=current) for _ in layers]
    first, last = (cut_stage(own, layers, RankLayout(pp=2, process=stage)) for stage, own in enumerate(copies))
    vars(last)["by_stage"] = [first, last]  # which run as if they were virtual stages of one process
    return last


def random_sequences(vocab_size: int) -> list[Sequence]:
    """Sequences of `CHUNKS`, in which two of three tokens are targets, the same in every process."""
    random = torch.Generator().manual_seed(0)
    lengths = {name: stop for chunk in CHUNKS for name, _, stop in chunk}
    found = []
    for length in lengths.values():
        tokens = torch.randint(0, vocab_size, (length,), generator=random, dtype=torch.int32)
        target = torch.rand(length, generator=random) < 2 / 3
        target[0], target[-1] = False, True
        found.append(Sequence(tokens, target))
    return found


def work_of(sequences: list[Sequence], k: int, num_stages: int = 1) -> RankWork:
    """The work of a rank with the chunks of `sequences`, of each of which `k` may hold activations."""
    parts = {name: [each for each in CHUNKS if each[0][0] == name] for name in range(len(sequences))}
    labels = [torch.from_numpy(shifted_labels(each.tokens.numpy(), each.target.numpy())) for each in sequences]
    tokens, chunks, tensors = [each.tokens for each in sequences], {}, {}
    for chunk_id, segments in enumerate(CHUNKS):
        spans: list[Span] = []
        for name, start, stop in segments:
            group, offset = name if len(parts[name]) > 1 else None, spans[-1].chunk_stop if spans else 0
            spans.append(Span(name, start, stop, len(tokens[name]), offset, group))
        own = [(name, slice(start, stop)) for name, start, stop in segments]
        ids, targets = (torch.cat([each[name][here] for name, here in own]) for each in (tokens, labels))
        positions = torch.cat([torch.arange(start, stop, dtype=torch.int32) for _, start, stop in segments])
        tensors[chunk_id] = ChunkTensors(ids[None], positions[None], targets, tuple(spans))
        own_parts = parts[segments[0][0]]
        chunks[chunk_id] = Chunk(
            chunk_id=chunk_id,
            group_id=spans[0].group_id,
            group_index=own_parts.index(segments),
            group_size=len(own_parts),
            num_tokens=len(ids),
            num_target_tokens=int((targets != NO_TARGET).sum()),
            prefix_tokens=segments[0][1],
            keeps_activations=True,
            cost=0.0,
            segments=tuple(Segment(*segment) for segment in segments),
            kept_attention=KEPT_ATTENTION.get(chunk_id, ""),
        )
    actions = [
        Action(_OPS[word[0]], int(word[1:]), stage)
        for word in ORDERS[k].split()
        for stage in range(num_stages)[:: -1 if word[0] == "B" else 1]
    ]
    return RankWork(0, 0, actions, chunks, tensors)


def draws_noise(model: CausalLM, tokens: Tensor) -> bool:
    """True if a model draws random numbers in training."""
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


def take_gradients(model: CausalLM) -> dict[str, Tensor]:
    """The gradients of a model by parameter, zeros where there is none; the model is left without."""
    weights = {name: weight for name, weight in model.model.named_parameters() if weight.requires_grad}
    gradients = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in weights.items()}
    model.model.zero_grad(set_to_none=True)
    return gradients


def vanishing_gradients(reference: dict[str, Tensor], share: float = 1e-14) -> list[str]:
    """The parameters whose gradient is zero but for rounding, at most a `share` of all together; or no number."""
    norms = {name: gradient.norm().item() for name, gradient in reference.items()}
    return [name for name, norm in norms.items() if not norm > share * math.hypot(*norms.values())]  # NaN too


def relative_errors(
    gradients: dict[str, Tensor], reference: dict[str, Tensor], vanishing: Collection[str]
) -> dict[str, float]:
    """Give ||g - g_ref|| / ||g_ref|| of every parameter; of `vanishing` ones, over the norm of all together."""
    norms = {name: gradient.norm().item() for name, gradient in reference.items()}
    norms |= dict.fromkeys(vanishing, math.hypot(*norms.values()))
    return {name: (gradients[name] - reference[name]).norm().item() / norm for name, norm in norms.items()}


def _compared(found: _Run, whole: _Run, how: str) -> ModelProof:
    (loss, gradients), (whole_loss, reference) = found, whole
    missing = {name: torch.zeros_like(each) for name, each in reference.items() if name not in gradients}
    errors = relative_errors(gradients | missing, reference, vanishing_gradients(reference, _VANISHING))
    errors["the loss"] = abs(loss - whole_loss) / abs(whole_loss)
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return ModelProof(errors[worst], f"{worst}, {how}")


def check_exact(config: Any, where: str, *, num_stages: int = 1, router_loss: str | None = None) -> str:
    """Refuse a model that is not exact; the scope of its load-balancing loss, see `router_loss_scope`.

    Types that the tests of this project hold are let through, and what was proved before, on one stage or on several,
    is not proved again, for the same features and versions. Raises UsageError.
    """
    scope = router_loss_scope(config, router_loss, where)
    if config.model_type in MODEL_TYPES:
        return scope
    if bool(getattr(config, "output_router_logits", False)) != (scope != "none"):
        config = copy.copy(config)
        config.output_router_logits = scope != "none"
    hint = "docs/models.md has the models that are known to be exact, and why others are not"
    model = f"model type {config.model_type!r}{' on pipeline stages' if num_stages > 1 else ''}"
    try:
        proof = proof_of(config, min(num_stages, 2))
    except UnprovedError as error:
        what = f"chunked gradients cannot be proved exact for {model}: {error}"
        raise UsageError(what, where=where, hint=hint) from error
    if not proof.holds:
        shown = f"off by {proof.error:.1e} ({proof.where}), as a small model of its class shows"
        raise UsageError(f"chunked gradients of {model} are {shown}", where=where, hint=hint)
    return scope


def proof_of(config: Any, num_stages: int) -> ModelProof:
    """The proof for a model, or the cached one for the same features and versions; raises as `prove`."""
    described = {"features": tiny_document(config.to_dict()), "stages": num_stages, "with": _versions()}
    key = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cached / "chunkplan" / "proofs" / f"{key}.json"
    try:
        return ModelProof(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        proof = prove(config, num_stages=num_stages)
    with suppress(OSError, UsageError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as out:
            json.dump(asdict(proof), out)
    return proof


@cache
def _versions() -> dict[str, str]:
    """Versions that the result depends on; of the runtime itself the content of its files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    own = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"torch": version("torch"), "transformers": version("transformers"), "runtime": own}
