"""Proves exactness: the gradients of a plan's chunks against those of the same sequences run whole, in float64."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.files.folder import temporary_folder
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import load_analysis
from chunkplan_runtime.attention.kernels import AUTO, Kernels
from chunkplan_runtime.models.checks import MODEL_TYPES
from chunkplan_runtime.models.model import CausalLM, new_model, planned_config
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.models.tiny import num_weights, small_config_of
from chunkplan_runtime.proof import prove
from chunkplan_runtime.training.executor import Executor

#: What rounding in float64 leaves far below and any mistake far above, in models that divide by nothing small. For
#: others, which the delta rule is one of, there is that of `prove`.
TOLERANCE = 1e-12

#: The reference runs sequences whole, with all their logits.
_LONGEST = 1_000_000

#: A larger model is not run itself: its weights in float64, and their gradients, take 5 GB.
_MOST_WEIGHTS = 300_000_000


@dataclass(frozen=True)
class StageProof:
    """The result of a small model of the class on so many stages: its worst gradient's error; None if it cannot run.

    `where`: the weight that has it, or why there is none.
    """

    num_stages: int
    error: float | None
    where: str


@dataclass(frozen=True)
class ParityReport:
    """The error of chunked gradients against whole-sequence ones: ||g - g_ref|| / ||g_ref|| of every parameter.

    Of those in `vanishing`, whose g_ref is zero but for rounding, its norm is replaced by that of all parameters
    together. `chunks` counts the plan's chunks by kind: standalone, dependent, mixed, zero_loss. `proofs`: of a model
    that was given, what a small one of its class shows. `ran_small`: the sequences were run on that too, as the model
    itself is too large to run whole.
    """

    max_relative_error: float
    relative_errors: dict[str, float]
    loss: float
    reference_loss: float
    chunks: dict[str, int]
    vanishing: list[str]
    tolerance: float
    passed: bool
    proofs: tuple[StageProof, ...] = ()
    ran_small: bool = False


def parity(
    lengths: Sequence[int],
    chunk_size: int,
    k: int,
    model: Path | str | None = None,
    seed: int = 0,
    *,
    attention: str = AUTO,
    kv_offload: bool = False,
    checkpointing: str = "none",
) -> ParityReport:
    """Plan sequences of random tokens as one step, run it, and compare with the sequences run whole.

    The twin of `chunkplan parity`. `lengths` and `chunk_size` in tokens. `model`: a name, a config.json or its folder;
    without it the model is a small one of the Qwen2 kind, and one that is too large to run whole is run as a small one
    of its class. `seed`: of weights and tokens. The rest is how the chunks are run.

    Raises:
        UsageError: a length, `chunk_size` or `k` is below 1, no sequence has two tokens, or the model is refused, by
            the error of a small model of its class too.
        DataError: `model` is not the config of a model.
        ChunkplanError: gradients are not finite.
    """
    from chunkplan import PlanConfig, build  # the planner, which executing a plan does not need

    if not 0 <= seed < 2**63:
        raise UsageError(f"the seed is {seed}", hint="give a whole number from 0")
    if not lengths or min(lengths) < 1 or max(lengths) < 2:
        message = "parity needs sequences of at least one token, and one of at least two"
        raise UsageError(message, hint="--lengths 700,130,90")
    if max(lengths) > _LONGEST:
        hint = f"parity runs sequences whole: at most {_LONGEST:,} tokens"
        raise UsageError(f"a length of {max(lengths):,} tokens", hint=hint)
    proofs: tuple[StageProof, ...] = ()
    ran_small = False
    if model is None:
        # What can go wrong: grouped heads, biases, two layers.
        heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        sizes: Any = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
        config: Any = Qwen2Config(**sizes, **heads, max_position_embeddings=max(lengths))
    else:
        config = planned_config(model, router_loss=True)
        prove.check_exact(config, str(model))
        proofs = (_stage_proof(config, 1), _stage_proof(config, 2))
        if ran_small := num_weights(config) > _MOST_WEIGHTS:
            config = small_config_of(config, max(lengths))
        config.output_router_logits = False  # the load-balancing loss is in the proof
    with temporary_folder(Path(tempfile.gettempdir()), "chunkplan-parity") as folder:
        (folder / "analysis").mkdir()
        analysis = write_random_analysis(folder / "analysis", lengths, config.vocab_size, seed)
        build(analysis, folder / "plan", PlanConfig(chunk_size=chunk_size, k=k, global_batch=len(lengths), seed=seed))
        built = new_model(config, torch.float64, seed, kernels=Kernels(attention))
        built.set_checkpointing(checkpointing)
        report = compare_plan(folder / "plan", analysis.path, built, kv_offload=kv_offload)
        return replace(report, proofs=proofs, ran_small=ran_small)


def _stage_proof(config: Any, num_stages: int) -> StageProof:
    try:
        proof = prove.proof_of(config, num_stages)
    except prove.UnprovedError as error:
        return StageProof(num_stages, None, str(error))
    return StageProof(num_stages, proof.error, proof.where)


def write_random_analysis(folder: Path, lengths: Sequence[int], vocab_size: int, seed: int) -> Analysis:
    """Write random tokens: of each sequence a random first part is prompt and some of the rest are targets."""
    random = np.random.default_rng(seed)
    writer = AnalysisWriter(folder)
    for record, length in enumerate(lengths):
        position = np.arange(length)
        target = (position > random.integers(0, length)) & (random.random(length) < 0.8)
        target[1:] |= position[1:] == length - 1
        writer.add(0, record, random.integers(0, vocab_size, length, dtype=np.int32), target)
    writer.finish(exact=True, sources=[])
    return load_analysis(folder)


def compare_plan(plan: Path, analysis: Path, model: CausalLM, *, kv_offload: bool = False) -> ParityReport:
    """Run the first step of a plan and the same sequences whole; `model` is left without gradients.

    Raises:
        DataError: plan or analysis is not what it should be.
        UsageError: see `Executor.stream`.
        ChunkplanError: gradients are not finite.
    """
    executor = Executor(model, kv_offload=kv_offload)
    work = next(iter(executor.stream(plan, analysis)))
    with evaluate_in_float64(model.model):
        # Whole sequences would draw other noise; what chunks draw that run again is for the model's proof to compare.
        is_noisy = prove.draws_noise(model, torch.zeros(2, dtype=torch.int64, device=model.device))
        if is_noisy:
            model.model.eval()
        loss = executor.step(work)
        gradients = prove.take_gradients(model)
        chunks = [chunk for rank in work.ranks for chunk in rank.chunks.values()]
        # A sequence counts as often as it occurs: every occurrence has its first token once.
        spans = [span for rank in work.ranks for each in rank.tensors.values() for span in each.of_sequences]
        sequences = sorted(span.sequence_id for span in spans if span.start == 0 and span.sequence_id >= 0)
        reference_loss = run_whole(model, load_analysis(analysis), sequences)
        reference = prove.take_gradients(model)
        if is_noisy:
            model.model.train()
    vanishing = prove.vanishing_gradients(reference)
    errors = prove.relative_errors(gradients, reference, vanishing)
    worst = float(np.max(list(errors.values())))  # unlike max(), never skips NaN
    if not math.isfinite(worst):
        hint = "with random weights this model overflows; use another config"
        raise ChunkplanError("gradients are not finite", hint=hint)
    tolerance = TOLERANCE if model.config.model_type in MODEL_TYPES else prove.TOLERANCE
    kinds = dict(Counter(chunk.kind.replace("-", "_") for chunk in chunks))
    return ParityReport(worst, errors, loss, reference_loss, kinds, vanishing, tolerance, worst <= tolerance)


def run_whole(model: CausalLM, analysis: Analysis, sequences: Sequence[int]) -> float:
    """Plain full-sequence training of one step: nothing here is shared with chunked execution but the weights."""
    attention, softcap = model.config._attn_implementation, getattr(model.config, "attn_logit_softcapping", None)
    # transformers' fused attention leaves a softcap out, and takes the causal mask for granted, without a word; of some
    # models there is none.
    is_fused = not softcap and model.is_causal and model.config.model_type in MODEL_TYPES
    model.model.set_attn_implementation("sdpa" if is_fused else "eager")
    tokens = analysis.tokens()
    num_targets = sum(int(tokens(sequence)[1].sum()) for sequence in sequences)
    total = 0.0
    for sequence in sequences:
        input_ids, target = (torch.from_numpy(array.copy()).to(model.device) for array in tokens(sequence))
        total += prove.train_whole(model, input_ids, target, num_targets)
    model.model.set_attn_implementation(attention)
    return total
