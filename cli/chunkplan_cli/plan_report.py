"""A plan in the terminal: its panel, its tables and its warnings. Readable at 80 columns and without colour."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from chunkplan.quantities import counted, gibibytes
from chunkplan.reporting.tables import Table
from chunkplan_cli.terminal import drawn_table, facts_grid, note, warn

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.cost.model import CostModel
    from chunkplan.cost.shape import ModelShape
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.planning.selection import SourceShare
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.reporting.plan_report import PlanReport
    from chunkplan.summary import PlanSummary

#: Of more ranks the terminal shows the heaviest and the lightest, half of each.
_MOST_RANKS = 6


def print_plan_tables(console: Console, report: PlanReport, manifest: Mapping[str, Any]) -> None:
    """Print the tables of a report, its memory, and what the numbers mean; `manifest` is the plan's."""
    from chunkplan.reporting.plan_words import machine_words, memory_words
    from chunkplan.reporting.tables import plan_tables

    for table in plan_tables(report, _MOST_RANKS):
        console.print()
        console.print(drawn_table(console, table))
    console.print()
    for line in memory_words(report.memory, report.summary.longest_sequence):
        console.print(Text(line))
    console.print()
    machine = machine_words(manifest["predictions"]["cost_model"])
    reduced = " Slowest steps: before gradients are summed." if report.summary.reduction_us else ""
    words = f"Times and memory are predicted for {machine}. Of attention: of pairs of a query and a key.{reduced}"
    console.print(Text(words, style="dim"))


# What a plan or a tuning asks of GPUs and of a model that these do not have: warnings, each with what to do.


def warn_of_memory(memory: PlanMemory, cost: CostModel, config: PlanConfig, tune: list[str] | None) -> None:
    """Warn of a plan that does not fit its GPUs: the largest part of its memory, and what helps.

    `tune`: the command that tunes for the same data, model and kind of GPU; None where that is not known.
    """
    from chunkplan.reporting.plan_words import memory_parts

    if memory.fits:
        return
    held = memory.memory
    warn(
        f"{cost.shape.name} takes {gibibytes(held.total)} a GPU in step {memory.step:,}, {cost.hardware.name} has "
        f"{gibibytes(memory.gpu_bytes)}: {memory_parts(held)}"
    )
    gpus = config.dp * cost.tp * config.pp
    if held.weights + held.gradients + held.optimizer + held.reserved > memory.gpu_bytes:
        helps = "weights, gradients and optimizer alone are too much, whatever the chunks: more GPUs, by --pp or --dp"
        gpus = max(8, 2 * gpus)
    else:
        helps = "; and ".join(_what_helps(memory, cost))
    command = "chunkplan tune" if tune is None else shlex.join([*tune, "--gpus", str(gpus)])
    note(f"hint: {helps}; `{command}` finds what fits")


def _what_helps(memory: PlanMemory, cost: CostModel) -> list[str]:
    """Return what reduces the larger of chunks and keys and values, or both if neither alone would do."""
    held = memory.memory
    of_chunks = held.activations + held.stage_inputs
    of_kv = held.kv + held.kv_gradients
    room = memory.gpu_bytes - (held.total - of_chunks - of_kv)
    helps = []
    if of_chunks > room or of_chunks >= of_kv:
        less = {"full": ", or --checkpointing offload", "offload": ""}.get(
            cost.checkpointing, ", or --checkpointing full"
        )
        helps.append(f"a smaller --chunk-size or --k{less}")
    if of_kv > room or of_kv > of_chunks:
        helps.append("train with --kv-offload, which keeps keys and values (KV) in host memory, or more --pp")
    return helps


def warn_of_chunk_size(chunk_size: int, totals: dict[str, int], dp: int, *, fits: bool, tune: list[str]) -> None:
    """Warn where a ChunkSize above every sequence is of no use: nothing fills a chunk, or it does not fit the GPU.

    `totals`: those of the plan's manifest. `tune`: the command that tunes for the same data and model.
    """
    longest, rank_tokens = totals["longest_sequence"], totals["num_tokens"] // (totals["num_steps"] * dp)
    if chunk_size > longest and (chunk_size > rank_tokens or not fits):
        warn(
            f"ChunkSize {chunk_size:,} is larger than any sequence (the longest has {counted(longest, 'token')}): "
            f"nothing is split. A rank's step has {counted(rank_tokens, 'token')} on average"
        )
        note(f"hint: a smaller --chunk-size takes less memory; `{shlex.join([*tune, '--gpus', '8'])}` chooses one")


def warn_of_positions(analysis: Analysis, model: ModelShape) -> None:
    """Warn of sequences that have more tokens than the model takes, before anything is done with them."""
    from chunkplan.lengths import Positions

    positions = Positions.of(analysis.num_tokens, model.max_positions)
    if positions is None or not positions.num_over:
        return
    most = positions.max_positions
    warn(
        f"{positions.num_over:,} of {counted(positions.num_sequences, 'sequence')} "
        f"{'has' if positions.num_over == 1 else 'have'} more than the {most:,} tokens that {model.name} takes, "
        f"the longest {positions.longest:,}: the trainer refuses such data"
    )
    note(
        f"hint: `chunkplan analyze DATA --max-length {most} --overlong truncate` cuts the end off these, `--overlong "
        "drop` leaves them out; or give a --model whose max_position_embeddings or rope scaling (YaRN) covers them"
    )


def print_plan_report(
    console: Console, summary: PlanSummary, manifest: Mapping[str, Any], memory: PlanMemory | None
) -> None:
    """Print what a plan comes to; `memory` is None where it does not describe the model and the GPU."""
    from chunkplan.reporting.plan_words import machine_words, overview_rows

    print_estimated(console, manifest)
    lines: list[RenderableType] = [
        facts_grid(overview_rows(summary, manifest, memory)),
        Text(f"\npredicted for {machine_words(manifest['predictions']['cost_model'])}", style="dim"),
        Text(f"content hash {manifest['content_hash'][:16]}", style="dim"),
    ]
    console.print(Panel(Group(*lines), title="plan", title_align="left", expand=False))


def note_loss(analysis: Analysis, given: Mapping[str, Any]) -> None:
    """Print which loss times are for where none is `given`; raises UsageError where one is that the data are not of."""
    from chunkplan.config.losses import USUAL, check_samples
    from chunkplan.planfile.samples import IN_WORDS

    if "loss" in given:
        check_samples(given["loss"], analysis.samples, str(analysis.path), analysis.token_columns)
    elif analysis.samples is not None:
        usual, kind = USUAL[analysis.samples], IN_WORDS[analysis.samples]
        note(f"loss: {usual}, as the data are {kind}; --loss names another")


#: Sources of a mix that are listed.
_LISTED = 20


def print_mix(console: Console, shares: Sequence[SourceShare]) -> None:
    """Print which shares of an epoch sources have, and what of each it skips or repeats."""
    in_all = [max(1, sum(getattr(share, name) for share in shares)) for name in ("num_occurrences", "num_tokens")]
    rows = []
    for share in shares[:_LISTED]:
        skipped = ["skips all" if share.num_skipped == share.num_sequences else f"skips {share.num_skipped:,}"]
        repeated = [f"repeats {share.num_repeated:,}"] if share.num_repeated else []
        words = ", ".join((skipped if share.num_skipped else []) + repeated)
        of_all = [f"{100 * share.num_occurrences / in_all[0]:.1f}%", f"{100 * share.num_tokens / in_all[1]:.1f}%"]
        rows.append((share.path, *of_all, f"{share.num_occurrences:,}", f"{share.num_sequences:,}", words))
    head = ("source", "of sequences", "of tokens", "sequences", "of", "each epoch")
    console.print(drawn_table(console, Table("The mix of an epoch", head, rows, texts=(head[0], head[-1]))))
    if len(shares) > _LISTED:
        console.print(f"and {len(shares) - _LISTED:,} more sources; --json lists them all")


def warn_of_weights(mix: Mapping[str, float | str]) -> None:
    """Warn where numbers that say how often an epoch takes a source look like shares of it."""
    numbers = [weight for weight in mix.values() if isinstance(weight, (int, float))]
    if len(numbers) == len(mix) > 1 and math.isclose(sum(numbers), 1, abs_tol=1e-6):
        shares = [
            f"--mix {shlex.quote(f'{name}={100 * weight:g}%')}" for name, weight in zip(mix, numbers, strict=True)
        ]
        warn("these numbers are how often an epoch takes each source, not its share")
        note(f"hint: for shares of the sequences of an epoch write {' '.join(shares)}")


def print_estimated(console: Console, manifest: Mapping[str, Any]) -> None:
    """Print, above everything else, that the lengths behind a plan were estimated or are a sample, if so."""
    from chunkplan.reporting.plan_words import caveats

    for caveat in caveats(manifest["analysis"]):
        console.print(Text(caveat, style="bold yellow"))
