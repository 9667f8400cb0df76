"""A plan in the terminal: its panel, its tables and its warnings. Readable at 80 columns and without colour."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import (
    counted,
    gibibytes,
    sharding_words,
)
from chunkplan_cli.terminal import drawn_table, note, warn

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.cost.model import CostModel
    from chunkplan.lengths import Positions
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.reporting.plan_report import PlanReport
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan.summary import PlanSummary

#: Of more ranks the terminal shows the heaviest and the lightest, half of each.
_MOST_RANKS = 6


def print_plan_tables(console: Console, report: PlanReport, header: PlanHeader) -> None:
    """Print the tables of a report; those of which there is nothing to say are left out."""
    from chunkplan.reporting import tables
    from chunkplan.reporting.plan_words import machine_words

    shown = [tables.fill_table(report.fill), tables.kinds_table(report.kinds)]
    shown += [tables.shared_table(report.shared)] if report.shared else []
    shown += tables.ranks_tables(report.ranks, _MOST_RANKS) if report.summary.dp > 1 else []
    shown += [tables.times_table(report.times)] if report.times.slowest else []
    for table in shown:
        console.print()
        console.print(drawn_table(console, table))
    console.print()
    console.print(_memory(report.memory, report.summary.longest_sequence))
    console.print()
    machine = machine_words(header.cost_model)
    reduced = " Slowest steps are without their reduction." if report.summary.reduction_us else ""
    words = f"Attention is pairs of a query and a key. Times and memory are predictions, of {machine}.{reduced}"
    console.print(Text(words, style="dim"))


def _memory(memory: PlanMemory | None, longest_sequence: int) -> Text:
    from chunkplan.reporting.plan_words import longest_words, memory_parts

    if memory is None:
        return Text("Memory: the plan does not describe the model and the GPU it was made for.")
    parts = memory_parts(memory.memory)
    words = ", ".join(f"{name} {gibibytes(num_bytes).removesuffix(' GiB')}" for name, num_bytes in parts)
    place = f"stage {memory.stage} of rank {memory.dp_rank} in step {memory.step}"
    total = f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)}"
    fits = "" if memory.fits else ", does not fit; `chunkplan tune ANALYSIS --gpus N` finds what does"
    of_plan = f"the longest here, of {counted(longest_sequence, 'token')}, fits" if memory.fits else ""
    longest = "; ".join(filter(None, (of_plan, longest_words(memory.longest))))
    shared = sharding_words(memory.sharding, memory.dp) if memory.dp > 1 else ""
    lines = (words, shared, f"{longest[:1].upper()}{longest[1:]}")
    return Text.assemble(
        ("Memory", "bold"), f" on {place}: {total}", (fits, "bold"), *(f"\n{line}" for line in lines if line)
    )


# What a plan or a tuning asks of GPUs and of a model that these do not have: warnings, each with what to do.


def warn_of_memory(memory: PlanMemory, cost: CostModel, config: PlanConfig, tune: list[str] | None) -> None:
    """Warn of a plan that does not fit its GPUs: what takes the room and what helps.

    `tune`: the command that tunes for the same data, model and GPUs, but for how many; None where that is not known.
    """
    from chunkplan.reporting.plan_words import memory_parts

    if memory.fits:
        return
    held = memory.memory
    parts = ", ".join(f"{name} {gibibytes(num_bytes).removesuffix(' GiB')}" for name, num_bytes in memory_parts(held))
    warn(
        f"{cost.shape.name} takes {gibibytes(held.total)} a GPU in step {memory.step:,}, {cost.hardware.name} has "
        f"{gibibytes(memory.gpu_bytes)}: {parts}"
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
    """Say what helps against the larger of chunks and keys and values, or against both if neither alone would do."""
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


def warn_of_positions(positions: Positions | None, model: str) -> None:
    """Warn of sequences that have more tokens than the model takes."""
    if positions is None or not positions.num_over:
        return
    most = positions.max_positions
    warn(
        f"{positions.num_over:,} of {counted(positions.num_sequences, 'sequence')} "
        f"{'has' if positions.num_over == 1 else 'have'} more than the {most:,} tokens that {model} takes, the longest "
        f"{positions.longest:,}: the trainer refuses such data"
    )
    note(
        f"hint: `chunkplan analyze DATA --max-length {most} --long truncate` cuts the end off these, `--long drop` "
        "leaves them out; or give a --model-config whose max_position_embeddings or rope scaling (YaRN) covers them"
    )


def print_plan_report(console: Console, summary: PlanSummary, header: PlanHeader, memory: PlanMemory | None) -> None:
    """Print what a plan comes to; `memory` is None where it does not describe the model and the GPU."""
    print_estimated(console, header)
    console.print(Panel(Group(*_overview(summary, header, memory)), title="plan", title_align="left", expand=False))


def print_estimated(console: Console, header: PlanHeader) -> None:
    """Say above everything else that the lengths behind a plan were estimated or are a sample, where they are."""
    from chunkplan.reporting.plan_words import caveats

    for caveat in caveats(exact=header.exact, sample=header.sample):
        console.print(Text(caveat, style="bold yellow"))


def _overview(summary: PlanSummary, header: PlanHeader, memory: PlanMemory | None) -> list[RenderableType]:
    from chunkplan.reporting.plan_words import machine_words, overview_rows

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in overview_rows(summary, header, memory):
        grid.add_row(Text(name, style="dim"), Text(value))
    return [
        grid,
        Text(f"\ntimes: {machine_words(header.cost_model)}", style="dim"),
        Text(f"content hash {header.content_hash[:16]}", style="dim"),
    ]
