"""One step both ways: as the chunks of a plan, and as rows that a model of transformers takes whole."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from chunkplan import PlanConfig, build
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import load_analysis
from chunkplan_runtime.devices import synchronize, wide
from chunkplan_runtime.execution.loss import cross_entropy
from chunkplan_runtime.feed.stream import ChunkTensors, PlanStream, StepWork, open_plan, shifted_labels
from chunkplan_runtime.models.model import CausalLM


@dataclass(frozen=True)
class Batch:
    """Sequences of random tokens: `work` in chunks, `rows` one each, `packed` into rows as long as the longest."""

    work: StepWork
    rows: list[ChunkTensors]
    packed: list[ChunkTensors]

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences together."""
        return self.work.step.num_tokens


def qwen2(hidden_size: int, num_layers: int, vocab_size: int, max_positions: int, **changes: Any) -> Qwen2Config:
    """The config of a model shaped as those of Qwen2.5: heads of 64, two to a KV head, an MLP of 2.75 widths."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=max_positions,
        **{
            "intermediate_size": hidden_size * 11 // 4,
            "num_attention_heads": hidden_size // 64,
            "num_key_value_heads": max(1, hidden_size // 128),
            **changes,
        },
    )


def make_batch(lengths: Sequence[int], chunk_size: int, k: int, vocab_size: int, seed: int = 0) -> Batch:
    """Plan sequences of random tokens, all of them targets, as one step."""
    with tempfile.TemporaryDirectory() as folder:
        analysis = write_analysis(Path(folder) / "analysis", lengths, vocab_size, seed)
        works = []
        for size in (chunk_size, max(lengths)):
            plan = Path(folder) / f"plan-{size}"
            build(analysis, plan, PlanConfig(chunk_size=size, k=k, global_batch=len(lengths)))
            opened = open_plan(plan, analysis.path)
            works.append(next(iter(PlanStream(*opened, vocab_size=vocab_size, max_positions=max(lengths), prefetch=0))))
        rows = []
        for sequence in range(len(lengths)):
            input_ids, target = analysis.tokens()(sequence)
            ids = torch.from_numpy(input_ids.copy())
            labels = torch.from_numpy(shifted_labels(input_ids, target))
            rows.append(ChunkTensors(ids[None], torch.arange(len(ids), dtype=torch.int32)[None], labels, ()))
    work, packed = works
    return Batch(work, rows, list(packed.ranks[0].tensors.values()))


def write_analysis(folder: Path, lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Analysis:
    """Write an analysis of random tokens, all of them but the first of a sequence targets."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    writer = AnalysisWriter(folder)
    for record, length in enumerate(lengths):
        writer.add(0, record, random.integers(0, vocab_size, length, np.int32), np.arange(length) > 0)
    writer.finish(exact=True, sources=[])
    return load_analysis(folder)


@contextmanager
def as_baseline(model: CausalLM) -> Iterator[None]:
    """Within the block the same model runs as transformers has it: SDPA, with activation checkpointing."""
    attention = model.config._attn_implementation
    model.model.set_attn_implementation("sdpa")
    model.set_checkpointing("full")
    try:
        yield
    finally:
        model.set_checkpointing("none")
        model.model.set_attn_implementation(attention)


def run_rows(model: CausalLM, rows: Sequence[ChunkTensors], num_target_tokens: int) -> float:
    """Run every row forward and backward by itself; returns the loss, adds to `.grad`.

    The loss is that of chunked execution, which never holds all logits: only chunking is compared. Rows of several
    sequences get transformers' own block-diagonal mask, by their position_ids; others get none.
    """
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for row in rows:
        input_ids, position_ids, labels = (
            tensor.to(model.device) for tensor in (row.input_ids, row.position_ids, row.labels)
        )
        hidden = model.model.get_decoder()(
            input_ids=input_ids, position_ids=position_ids.long(), use_cache=False
        ).last_hidden_state[0]
        weights = hidden.new_full((len(hidden),), 1 / num_target_tokens, dtype=wide(hidden.dtype))
        losses, gradient = cross_entropy()(model.head, hidden, labels, weights)
        torch.autograd.backward(hidden, gradient)
        total += losses.sum()
    return total.item() / num_target_tokens


def run_whole(model: CausalLM, batch: Batch) -> float:
    """Run the step in rows of one sequence each, as transformers runs them; returns the loss."""
    with as_baseline(model):
        return run_rows(model, batch.rows, batch.work.step.num_target_tokens)


def interleaved(ways: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Measure the seconds of every way, in turn, `repeats` times after a round that does not count; each is shown."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            synchronize(device)
            started = time.perf_counter()
            way()
            synchronize(device)
            seconds[name].append(time.perf_counter() - started)
            print(f"{name}: {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    return {name: values[1:] for name, values in seconds.items()}


def ratio(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, str]:
    """The ratio of the medians, and the least and the largest ratio of two that ran one after the other."""
    pairs = [one / other for one, other in zip(seconds, others, strict=True)]
    return round(statistics.median(seconds) / statistics.median(others), 3), f"{min(pairs):.2f} to {max(pairs):.2f}"


def zero_gradients(model: CausalLM) -> None:
    """Make gradients of zero: what a backward adds to is there before it is measured."""
    for parameter in model.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
