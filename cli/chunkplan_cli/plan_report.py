"""A plan in the terminal: what it comes to, in a panel. Readable at 80 columns and without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import (
    ZERO,
    counted,
    gibibytes,
    k_words,
    kept_words,
    percent,
    ratio,
    seconds,
    selection_words,
)

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan.summary import PlanSummary


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
    from chunkplan.reporting.plan_words import machine_words, schedule_words, time_words

    config, cost_model, selection = header.config, header.cost_model, header.selection
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    rows = [
        ("ChunkSize, K", f"{summary.chunk_size:,} tokens, {k_words(summary.k, config.k_by_length)}"),
        (
            "dp x pp",
            f"{summary.dp} x {summary.pp}, {schedule_words(config, cost_model['shape']['num_layers'])}",
        ),
        ("steps", _steps(summary)),
        ("tokens", f"{summary.num_tokens:,}, of which {summary.num_target_tokens:,} targets"),
        *selection_words(config, num_held_out=selection["num_held_out"], num_sequences=selection["num_sequences"]),
        ("chunks", _chunks(summary)),
        ("fewest chunks", _bound(summary)),
        (
            "micro-batches",
            f"{summary.num_sequences:,} of up to {counted(summary.longest_sequence, 'token')} -> "
            f"{summary.num_chunks:,} of up to {summary.chunk_size:,}",
        ),
    ]
    if summary.num_groups:
        rows.append(
            (
                "activations held",
                f"of {counted(summary.peak_retained_tokens, 'token')} at once on a stage; the longest sequence has "
                f"{summary.longest_sequence:,}",
            )
        )
    if memory is not None:
        used = f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)} at the fullest moment"
        if memory.memory.kept_attention:
            used += f", {gibibytes(memory.memory.kept_attention)} of it attention of what is run again"
        used += f", {ZERO[memory.sharding]}" if memory.dp > 1 and memory.sharding != "optimizer" else ""
        rows.append(("GPU memory", used + ("" if memory.fits else ": does not fit")))
        if memory.host_bytes:
            rows.append(("host memory", f"{gibibytes(memory.host_bytes)} for each GPU at most"))
    if summary.dp > 1:
        rows.append(("balance", _balance(summary)))
    if summary.num_exceeding_steps:
        rows.append(("too long a sequence", _exceeding(summary, config)))
    if summary.num_shared_sequences:
        rows.append(("shared sequences", _shared(summary)))
    rows += [
        ("recomputed", _recomputed(summary)),
        ("predicted", time_words(summary.predicted_us, summary.lower_bound_us, summary.reduction_us)),
    ]
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(value))
    return [
        grid,
        Text(f"\ntimes: {machine_words(cost_model)}", style="dim"),
        Text(f"content hash {header.content_hash[:16]}", style="dim"),
    ]


def _steps(summary: PlanSummary) -> str:
    if summary.num_steps == 1:
        words = f"1, of {counted(summary.num_sequences, 'sequence')}"
    else:
        words = f"{summary.num_steps:,}, {counted(summary.global_batch, 'sequence')} each"
        if summary.num_steps * summary.global_batch != summary.num_sequences:
            words += "; an epoch's last has fewer"
    if summary.num_dropped_sequences:
        words += f"; {counted(summary.num_dropped_sequences, 'sequence')} of short last batches dropped"
    return words


def _chunks(summary: PlanSummary) -> str:
    of = "split sequences"
    if summary.num_shared_sequences:
        of = "split or shared sequences; each rank's part of one is a chunk"
    parts = [
        f"{summary.num_standalone - summary.num_zero_loss:,} standalone",
        f"{summary.num_dependent:,} dependent (of {summary.num_groups:,} {of})",
    ]
    if summary.num_zero_loss:
        parts.append(f"{summary.num_zero_loss:,} zero-loss")
    return f"{summary.num_chunks:,}, {percent(summary.token_fill)} full: " + ", ".join(parts)


def _bound(summary: PlanSummary) -> str:
    steps = f"{summary.num_optimal_steps:,} of {counted(summary.num_steps, 'step')} optimal"
    proved = f"{steps}: proved to have the fewest chunks"
    over = summary.chunks_over_bound - 1
    if over == 0:
        return proved
    if summary.dp == 1:
        return f"{proved}; all together {percent(over)} over the bound"
    packing = summary.packing_over_bound - 1
    given = "proved" if packing == 0 else f"but for {percent(packing)}"
    bound = f"{percent(over)} over the bound of any assignment, for balance ({steps})"
    return f"{given}, given what each rank has to run; {bound}"


def _balance(summary: PlanSummary) -> str:
    words = f"over all steps the heaviest rank takes {ratio(summary.heaviest_over_mean)} times the mean rank"
    if summary.heaviest_over_work is not None:
        words += f", and {ratio(summary.heaviest_over_work)} times work / dp (forward and backward alone)"
    return words


def _exceeding(summary: PlanSummary, config: PlanConfig) -> str:
    from chunkplan.reporting.plan_words import may_share_words

    steps = f"{summary.num_exceeding_steps:,} of {counted(summary.num_steps, 'step')}"
    even = "even shared as it is " if summary.num_shared_sequences else ""
    return (
        f"{percent(summary.exceeding_share)} of the imbalance: in {steps} one costs {even}more than a rank's share, "
        f"which no assignment can balance. They take {seconds(summary.exceeding_predicted_us)}, at least "
        f"{seconds(summary.exceeding_lower_bound_us)}{may_share_words(config)}"
    )


def _shared(summary: PlanSummary) -> str:
    from chunkplan.reporting.plan_words import least_words

    words = f"{summary.num_shared_sequences:,}, {percent(summary.shared_work_share)} of the work"
    if summary.unshared_lower_bound_us is None:
        return words
    least = least_words(summary.lower_bound_us, summary.unshared_lower_bound_us, summary.reduction_us)
    return f"{words}; any plan takes {least}"


def _recomputed(summary: PlanSummary) -> str:
    """Say what part of the work is run again and, where chunks keep attention for that, how many do, and where."""
    words = f"{percent(summary.recompute_share)} of the work"
    places = [f"{kept_words(where)} by {number:,}" for where, number in summary.num_kept.items() if number]
    if not places:
        return words
    return f"{words}: {counted(summary.num_recomputed, 'chunk')}, attention kept {' and '.join(places)}"
