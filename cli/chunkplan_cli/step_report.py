"""One step of a plan in the terminal: the chunks of each rank, and what its stages do."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from chunkplan.operations import OPS
from chunkplan.quantities import counted, kept_words, percent, seconds
from chunkplan.schedule.trace import LETTERS
from chunkplan_cli.gantt import OP_WORDS
from chunkplan_cli.plan_report import print_estimated
from chunkplan_cli.terminal import drawn_table, facts_grid

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.planfile.plan import Action, Chunk, Plan, PlanStep
    from chunkplan.reporting.shared_sequences import StepShares
    from chunkplan.reporting.tables import Table

#: By op its letter, for the line of a stage's actions.
_LETTERS = dict(zip(OPS, LETTERS, strict=True))

#: A step of a large plan has hundreds of chunks and actions: --json shows them all.
_MAX_CHUNKS = 40
_MAX_ACTIONS = 200


def print_step(console: Console, step: PlanStep, shares: StepShares, plan: Plan, *, lists_actions: bool) -> None:
    """Print the chunks of each rank of a step, which sequences ranks share, and what its stages do.

    That is how many actions of each op they do, or, where it `lists_actions`, all of these in their order.
    """
    from chunkplan.planfile.manifest import reduction_us_of
    from chunkplan.reporting.plan_words import least_words

    config = plan.config
    print_estimated(console, plan.manifest)
    console.print(
        f"step {step.step} (epoch {step.epoch}): {counted(step.num_sequences, 'sequence')}, "
        f"{counted(step.num_tokens, 'token')}, {counted(step.num_target_tokens, 'target')}, "
        f"{counted(step.num_chunks, 'chunk')}"
        + (" (optimal)" if step.optimal else f" (at least {step.chunks_lower_bound:,})")
    )
    after = reduction_us_of(plan.manifest) or 0.0
    reduction = f", {seconds(after)} of it adding up gradients" if after else ""
    console.print(
        f"predicted {seconds(step.predicted_us + after)}{reduction}; any plan of these sequences takes "
        f"{least_words(step.lower_bound_us, shares.unshared_lower_bound_us, after)}"
    )
    if shares.sequences:
        console.print()
        console.print(drawn_table(console, _shared_table(shares)))
    for rank, chunks in step.chunks.items():
        console.print()
        console.print(drawn_table(console, _chunk_table(rank, chunks, config.chunk_size)))
        if len(chunks) > _MAX_CHUNKS:
            console.print(f"... and {len(chunks) - _MAX_CHUNKS:,} more chunks (--json shows all)")
        console.print()
        if lists_actions:
            lines = [_action_line(step.actions[rank, stage], config.virtual_stages) for stage in range(config.pp)]
            console.print(facts_grid((f"stage {stage}", line) for stage, line in enumerate(lines)))
        else:
            console.print(drawn_table(console, _counted_actions(step, rank, config)))
    console.print()
    console.print(Text(_legend(step), style="dim"))
    if lists_actions and config.virtual_stages > 1:
        console.print(Text("F3.1 chunk 3, virtual stage 1", style="dim"))
    if shares.sequences:
        console.print(Text("part 1/2 x4: shared by 4 ranks; time: of one of them, exchange is part of it", style="dim"))
    for where in sorted({chunk.kept_attention for chunks in step.chunks.values() for chunk in chunks}):
        if words := kept_words(where):
            console.print(Text(f"part 1/2 attn {where}: run again, with its attention kept {words}", style="dim"))
    if not lists_actions:
        how = "--actions lists them in order, chunkplan simulate draws when each is done"
        console.print(Text(how, style="dim"))


def _shared_table(shares: StepShares) -> Table:
    from chunkplan.reporting.tables import Table, way_words

    rows = [
        (
            *(str(row.sequence_id), f"{row.num_tokens:,}", f"{row.first_rank}-{row.first_rank + row.num_ranks - 1}"),
            *(way_words(row.num_ranks, row.num_heads), f"{row.num_chunks:,}", seconds(row.predicted_us)),
            "?" if row.exchange_us is None else percent(row.exchange_us / max(row.predicted_us, 1e-30)),
        )
        for row in shares.sequences
    ]
    head = ("sequence", "tokens", "ranks", "share", "chunks", "time", "exchange")
    return Table("Shared sequences", head, rows, texts=("share",))


def _chunk_table(rank: int, chunks: list[Chunk], chunk_size: int) -> Table:
    """Make a table that fits 80 columns without cutting a number: sequences wrap, prefixes are there if any are."""
    from chunkplan.reporting.tables import Table

    shown = chunks[:_MAX_CHUNKS]
    prefix = ("prefix",) if any(chunk.prefix_tokens for chunk in shown) else ()
    rows = [
        (
            *(str(chunk.chunk_id), kind_words(chunk), f"{chunk.num_tokens:,}"),
            *(f"{chunk.num_tokens / chunk_size:.0%}", f"{chunk.num_target_tokens:,}"),
            *([f"{chunk.prefix_tokens:,}" if chunk.prefix_tokens else ""] if prefix else []),
            *(seconds(chunk.cost), _sequences(chunk)),
        )
        for chunk in shown
    ]
    head = ("chunk", "kind", "tokens", "fill", "targets", *prefix, "cost", "sequences")
    return Table(f"rank {rank}", head, rows, texts=("kind", "sequences"))


def kind_words(chunk: Chunk) -> str:
    """Say what kind of chunk it is, which part of a sequence it holds, and how many ranks share that.

    Of one that is run again also where it keeps attention for that, if it does.
    """
    if chunk.group_id is None:
        return chunk.kind
    shared = f" x{chunk.cp_size}" if chunk.cp_size > 1 else ""
    again = "" if chunk.keeps_activations else " kv"
    again = f" attn {chunk.kept_attention}" if kept_words(chunk.kept_attention) else again
    return f"part {chunk.group_index + 1}/{chunk.group_size}{shared}{again}"


def _sequences(chunk: Chunk) -> str:
    ids = [str(each) for each in dict.fromkeys(segment.sequence_id for segment in chunk.segments)]
    shown = ", ".join(ids[:3])
    return shown if len(ids) <= 3 else f"{shown} +{len(ids) - 3}"


def _counted_actions(step: PlanStep, rank: int, config: PlanConfig) -> Table:
    """Make a row of each run of stages that do as many actions of each op, with when the first and last of them are
    done."""
    from chunkplan.reporting.tables import Table

    counts = [Counter(action.op for action in step.actions[rank, stage]) for stage in range(config.pp)]
    ops = [op for op in OPS if any(op in each for each in counts)]
    rows = []
    for _, run in groupby(range(config.pp), key=lambda stage: sorted(counts[stage].items())):
        stages = list(run)
        first, last = stages[0], stages[-1]
        times = [step.schedule_us[rank, stage] for stage in stages]
        done = list(dict.fromkeys(map(seconds, (min(times), max(times)))))
        name = f"{first}" if first == last else f"{first}-{last}"
        rows.append((name, *(f"{counts[first][op]:,}" for op in ops), f"{counts[first].total():,}", " to ".join(done)))
    head = ("stages" if config.pp > 1 else "stage", *(_LETTERS[op] for op in ops), "all", "done after")
    return Table(f"actions of rank {rank}", head, rows)


def _action_line(actions: list[Action], virtual_stages: int) -> str:
    words = [_word(action, virtual_stages) for action in actions[:_MAX_ACTIONS]]
    if len(actions) > _MAX_ACTIONS:
        words.append(f"... {len(actions) - _MAX_ACTIONS:,} more")
    return " ".join(words)


def _word(action: Action, virtual_stages: int) -> str:
    suffix = f".{action.virtual_stage}" if virtual_stages > 1 else ""
    return f"{_LETTERS.get(action.op, action.op)}{action.chunk_id}{suffix}"


def _legend(step: PlanStep) -> str:
    """Say what the letters that occur mean."""
    done = {action.op for actions in step.actions.values() for action in actions[:_MAX_ACTIONS]}
    words = [f"{letter} {what}" for op, letter, what in zip(OPS, LETTERS, OP_WORDS, strict=True) if op in done]
    return "  ".join(words)
