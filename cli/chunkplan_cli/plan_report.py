"""A plan in the terminal: its panel, its tables and its warnings. Readable at 80 columns and without colour."""

from __future__ import annotations

import shlex
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
    sharding_words,
)
from chunkplan_cli.terminal import bar, note, titled_table, warn

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.cost.model import CostModel
    from chunkplan.lengths import Positions
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.reporting.plan_report import FillBand, KindRow, PlanReport, RankRow
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan.reporting.shared_sequences import SharedRow
    from chunkplan.reporting.slow_steps import StepTimeSummary
    from chunkplan.summary import PlanSummary

# What lies behind a plan's overview, in tables: fill, kinds of chunks, ranks, slow steps, memory.


_MAX_BAR = 30

#: Of more ranks than twice that many, the heaviest and the lightest are shown.
_MOST_RANKS = 3


def print_plan_tables(console: Console, report: PlanReport, header: PlanHeader) -> None:
    """Print the tables of a report; those of which there is nothing to say are left out."""
    from chunkplan.reporting.plan_words import machine_words

    parts = [_fill(console, report.fill), _kinds(report.kinds)]
    if report.shared:
        parts.append(_shared_table(report.shared))
    if report.summary.dp > 1:
        parts += [_ranks(console, report.ranks), _time_of_ranks(report.ranks)]
    if report.times.slowest:
        parts.append(_times(report.times))
    for part in parts:
        console.print()
        console.print(part)
    console.print()
    console.print(_memory(report.memory, report.summary.longest_sequence))
    console.print()
    machine = machine_words(header.cost_model)
    reduced = " Slowest steps are without their reduction." if report.summary.reduction_us else ""
    words = f"* pairs of a query and a key. Times and memory are predictions, of {machine}.{reduced}"
    console.print(Text(words, style="dim"))


def _fill(console: Console, bands: tuple[FillBand, ...]) -> Table:
    table = titled_table("Fill, of ChunkSize")
    table.add_column("")
    for name in ("chunks", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    num_chunks = sum(band.num_chunks for band in bands)
    most = max(band.num_chunks for band in bands)
    for band in bands:
        table.add_row(
            f"{100 * band.low:3.0f} - {100 * band.high:3.0f}%",
            f"{band.num_chunks:,}",
            percent(band.num_chunks / max(num_chunks, 1)),
            bar(console, band.num_chunks, most, _MAX_BAR),
        )
    return table


def _kinds(kinds: tuple[KindRow, ...]) -> Table:
    table = titled_table("Chunks by kind")
    table.add_column("")
    for name in ("chunks", "tokens", "fill", "of tokens", "of attention*", "of work"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in kinds:
        shares = (row.fill, row.token_share, row.attention_share, row.cost_share)
        table.add_row(row.kind, f"{row.num_chunks:,}", f"{row.num_tokens:,}", *map(percent, shares))
    return table


def _shared_table(shared: tuple[SharedRow, ...]) -> Table:
    from chunkplan.reporting.shared_sequences import way_words

    table = titled_table("Shared sequences, by number of ranks")
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("share", no_wrap=True)
    for name in ("sequences", "tokens", "of work", "exchange"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shared:
        exchange = "?" if row.exchange_share is None else percent(row.exchange_share)
        table.add_row(
            str(row.num_ranks),
            way_words(row.num_ranks, row.num_heads),
            f"{row.num_sequences:,}",
            f"{row.num_tokens:,}",
            percent(row.work_share),
            exchange,
        )
    return table


def _ranks(console: Console, ranks: tuple[RankRow, ...]) -> Table:
    table = titled_table("Ranks, over all steps")
    for name in ("rank", "chunks", "tokens", "work", "of mean", "last done in"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    by_work = sorted(ranks, key=lambda row: -row.cost_us)
    few = len(ranks) <= 2 * _MOST_RANKS
    for row in ranks if few else [*by_work[:_MOST_RANKS], *by_work[-_MOST_RANKS:]]:
        table.add_row(
            str(row.dp_rank),
            f"{row.num_chunks:,}",
            f"{row.num_tokens:,}",
            seconds(row.cost_us),
            f"{row.over_mean:.4f}",
            counted(row.num_steps_slowest, "step"),
            bar(console, row.cost_us, by_work[0].cost_us, _MAX_BAR // 3),
        )
    if not few:
        table.title = Text(f"Ranks, over all steps: the heaviest and the lightest of {len(ranks):,}", style="bold")
    return table


def _time_of_ranks(ranks: tuple[RankRow, ...]) -> Table:
    from chunkplan.reporting.plan_words import rank_time_words

    table = titled_table("Time of the ranks")
    for name in ("rank", "busy", "exchange", "waiting", "reduction"):
        table.add_column(name, justify="right", no_wrap=True)
    by_work = sorted(ranks, key=lambda row: -row.cost_us)
    for row in ranks if len(ranks) <= 2 * _MOST_RANKS else [*by_work[:_MOST_RANKS], *by_work[-_MOST_RANKS:]]:
        table.add_row(str(row.dp_rank), *rank_time_words(row))
    return table


def _times(times: StepTimeSummary) -> Table:
    table = titled_table("Slowest steps")
    for name in ("step", "time", "of median"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mostly because of", overflow="fold")
    for step in times.slowest:
        table.add_row(str(step.step), seconds(step.predicted_us), f"{step.over_median:.2f}", Text(step.why))
    table.add_row(str(times.median_step), seconds(times.median_us), "1.00", "the median step")
    return table


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
