"""A plan in the terminal: the whole, and one step. Readable at 80 columns and without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chunkplan_cli.quantities import k_words, percent, seconds

if TYPE_CHECKING:
    from chunkplan.planfile.plan import Action, Chunk, PlanStep
    from chunkplan.summary import PlanSummary

#: One letter an op, for the line of a stage's actions.
_LETTERS = {
    "forward": "F",
    "forward_kv": "f",
    "recompute": "R",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}
#: A step of a large plan has hundreds of chunks and actions: --json shows them all.
_MAX_CHUNKS = 40
_MAX_ACTIONS = 200


def print_plan_report(console: Console, summary: PlanSummary, manifest: dict[str, Any]) -> None:
    """Print what a plan comes to."""
    print_estimated(console, manifest)
    console.print(Panel(Group(*_overview(summary, manifest)), title="plan", title_align="left", expand=False))


def print_estimated(console: Console, manifest: dict[str, Any]) -> None:
    """Where the lengths behind a plan were estimated or are a sample, say so above everything else."""
    if sample := manifest["analysis"].get("sample"):
        message = f"A SAMPLE of {100 * sample:g} % of the records: a plan to look at, not to train."
        console.print(Text(message, style="bold yellow"))
    if not manifest["analysis"]["exact"]:
        console.print(Text("ESTIMATED lengths, from bytes: a plan to look at, not to train.", style="bold yellow"))


def _overview(summary: PlanSummary, manifest: dict[str, Any]) -> list[Any]:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    rows = [
        ("chunk size, K", f"{summary.chunk_size:,} tokens, {k_words(summary.k, manifest['config']['k_by_length'])}"),
        ("dp x pp", f"{summary.dp} x {summary.pp}"),
        (
            "schedule",
            _schedule(manifest["config"], manifest["predictions"]["cost_model"]["shape"]["num_layers"]),
        ),
        ("steps", f"{summary.num_steps:,}, {summary.global_batch:,} sequences each{_short(summary)}"),
        (
            "tokens",
            f"{summary.num_tokens:,}, of which {summary.num_target_tokens:,} targets",
        ),
        *_selection(manifest),
        ("chunks", _chunks(summary)),
        ("token fill", f"{percent(summary.token_fill)} of chunk size"),
        ("fewest chunks", _bound(summary)),
        (
            "micro-batches",
            f"{summary.num_sequences:,} of up to {summary.longest_sequence:,} tokens -> "
            f"{summary.num_chunks:,} of up to {summary.chunk_size:,}",
        ),
    ]
    if summary.num_groups:
        rows.append(
            (
                "activations held",
                f"of {summary.peak_retained_tokens:,} tokens at once on a stage; the longest sequence has "
                f"{summary.longest_sequence:,}",
            )
        )
    if summary.dp > 1 and summary.heaviest_rank_mean is not None:
        rows.append(
            (
                "heaviest rank",
                f"{summary.heaviest_rank_mean:.4f} of the mean over ranks, {summary.heaviest_rank_max:.4f} at worst"
                + (", where steps can be balanced" if summary.num_exceeding_steps else ""),
            )
        )
    if summary.num_exceeding_steps:
        rows.append(("too long a sequence", _exceeding(summary)))
    rows += [
        ("recomputed", f"{percent(summary.recompute_share)} of the work"),
        (
            "predicted",
            f"{seconds(summary.predicted_us)}, at least {seconds(summary.lower_bound_us)}"
            f" ({percent(summary.lower_bound_us / max(summary.predicted_us, 1e-30))})",
        ),
    ]
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), value)
    return [
        grid,
        Text(f"\ntimes: {_machine(manifest['predictions']['cost_model'])}", style="dim"),
        Text(f"content hash {manifest['content_hash'][:16]}", style="dim"),
    ]


def _machine(cost_model: dict[str, Any]) -> str:
    shape, hardware = cost_model["shape"], cost_model["hardware"]
    words = [f"{cost_model['tp']} GPUs a stage"] if cost_model["tp"] > 1 else []
    words += ["layers checkpointed"] if cost_model["checkpointing"] == "full" else []
    words += ["KV offloaded"] if cost_model["kv_offload"] else []
    return ", ".join([f"{shape['name']} on {hardware['name']}", *words])


def _schedule(config: dict[str, Any], num_layers: int) -> str:
    from chunkplan.cost.durations import split_layers

    layers = split_layers(num_layers, config["pp"] * config["virtual_stages"])
    words = [str(config["schedule"])]
    if config["virtual_stages"] > 1:
        words.append(f"{config['virtual_stages']} model parts a stage")
    if config["pp"] > 1:
        even = f"{layers[0]}" if len(set(layers)) == 1 else f"{layers[0]} to {layers[-1]}"
        words.append(f"{even} layers a {'part' if config['virtual_stages'] > 1 else 'stage'}")
    if config["memory_tokens"] is not None:
        words.append(f"activations of {config['memory_tokens']:,} tokens a stage at most")
    return ", ".join(words)


def _short(summary: PlanSummary) -> str:
    if summary.num_dropped_sequences:
        return f"; {summary.num_dropped_sequences:,} sequences of short last batches dropped"
    return "" if summary.num_steps * summary.global_batch == summary.num_sequences else "; an epoch's last has fewer"


def _chunks(summary: PlanSummary) -> str:
    parts = [
        f"{summary.num_standalone - summary.num_zero_loss:,} standalone",
        f"{summary.num_dependent:,} dependent (of {summary.num_groups:,} split sequences)",
    ]
    if summary.num_zero_loss:
        parts.append(f"{summary.num_zero_loss:,} zero-loss")
    return f"{summary.num_chunks:,}: " + ", ".join(parts)


def _bound(summary: PlanSummary) -> str:
    proved = f"{summary.num_optimal_steps:,} of {summary.num_steps:,} steps optimal: proved to have the fewest chunks"
    over = summary.chunks_over_bound - 1
    if over == 0:
        return proved
    if summary.dp == 1:
        return f"{proved}; all together {percent(over)} over the bound"
    packing = summary.packing_over_bound - 1
    given = "proved" if packing == 0 else f"but for {percent(packing)}"
    return (
        f"{given}, given what each rank has to run; {percent(over)} over the bound of any spread, for balance "
        f"({summary.num_optimal_steps:,} of {summary.num_steps:,} steps optimal)"
    )


def _exceeding(summary: PlanSummary) -> str:
    steps = f"{summary.num_exceeding_steps:,} of {summary.num_steps:,} steps"
    return (
        f"in {steps} one costs more than a rank's share: no spread can balance them. They take "
        f"{seconds(summary.exceeding_predicted_us)}, at least {seconds(summary.exceeding_lower_bound_us)}"
    )


def _selection(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """What the plan holds of the data, where that is not every sequence once an epoch."""
    config, selection = manifest["config"], manifest["selection"]
    rows = []
    if config["holdout"] is not None:
        held_out = f"{selection['num_held_out']:,} of {selection['num_sequences']:,} sequences"
        rows.append(("held out", held_out + (": these" if config["part"] == "eval" else "")))
    if config["mix"]:
        rows.append(("mix", ", ".join(f"{source} x {weight:g}" for source, weight in config["mix"].items())))
    return rows


def print_step(console: Console, step: PlanStep, manifest: dict[str, Any]) -> None:
    """Print the chunks of each rank of a step, and what its stages do."""
    config = manifest["config"]
    print_estimated(console, manifest)
    console.print(
        f"step {step.step} (epoch {step.epoch}): {step.num_sequences:,} sequences, {step.num_tokens:,} tokens, "
        f"{step.num_target_tokens:,} targets, {step.num_chunks:,} chunks"
        + (" (optimal)" if step.optimal else f" (at least {step.chunks_lower_bound:,})")
    )
    console.print(f"predicted {seconds(step.predicted_us)}, at least {seconds(step.lower_bound_us)}")
    for rank, chunks in step.chunks.items():
        console.print()
        console.print(_chunk_table(rank, chunks, config["chunk_size"]))
        if len(chunks) > _MAX_CHUNKS:
            console.print(f"... and {len(chunks) - _MAX_CHUNKS:,} more chunks (--json shows all)")
        console.print()
        stages = Table.grid(padding=(0, 2))
        stages.add_column(no_wrap=True, style="dim")
        stages.add_column()
        for stage in range(config["pp"]):
            stages.add_row(f"stage {stage}", _action_line(step.actions[rank, stage]))
        console.print(stages)
    console.print()
    console.print(Text("F forward  f forward, keeps KV only  R recompute  B backward", style="dim"))


def _chunk_table(rank: int, chunks: list[Chunk], chunk_size: int) -> Table:
    table = Table(title=Text(f"rank {rank}", style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, justify in (("chunk", "right"), ("kind", "left"), ("tokens", "right"), ("fill", "right")):
        table.add_column(name, justify=justify, no_wrap=True, header_style="dim")  # type: ignore[arg-type]
    for name in ("targets", "prefix", "cost"):
        table.add_column(name, justify="right", no_wrap=True, header_style="dim")
    table.add_column("sequences", header_style="dim", overflow="ellipsis", no_wrap=True)
    for chunk in chunks[:_MAX_CHUNKS]:
        table.add_row(
            str(chunk.chunk_id),
            _kind(chunk),
            f"{chunk.num_tokens:,}",
            f"{chunk.num_tokens / chunk_size:.0%}",
            f"{chunk.num_target_tokens:,}",
            f"{chunk.prefix_tokens:,}" if chunk.prefix_tokens else "",
            seconds(chunk.cost),
            _sequences(chunk),
        )
    return table


def _kind(chunk: Chunk) -> str:
    if not chunk.segments:
        return "zero-loss"
    if chunk.group_id is None:
        return "standalone"
    return f"part {chunk.group_index + 1}/{chunk.group_size}" + ("" if chunk.keeps_activations else " kv")


def _sequences(chunk: Chunk) -> str:
    ids = [str(segment.sequence_id) for segment in chunk.segments]
    shown = ", ".join(ids[:3])
    return shown if len(ids) <= 3 else f"{shown} +{len(ids) - 3}"


def _action_line(actions: list[Action]) -> str:
    words = [f"{_LETTERS.get(action.op, action.op)}{action.chunk_id}" for action in actions[:_MAX_ACTIONS]]
    if len(actions) > _MAX_ACTIONS:
        words.append(f"... {len(actions) - _MAX_ACTIONS:,} more")
    return " ".join(words)
