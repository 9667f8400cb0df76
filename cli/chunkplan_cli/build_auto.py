"""`build --auto`: what a plan is built with is read from an earlier tuning, or tuned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.cost.fused import fused_words
from chunkplan.errors import UsageError
from chunkplan.options import options_of
from chunkplan.quantities import ZERO, counted, gibibytes, k_words, percent, trained_words
from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.declared import CliValues, tune_options
from chunkplan_cli.progress import tuning_progress
from chunkplan_cli.terminal import note, warn

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.tuning.document import Tuned


#: Options of a plan of which a tuning tries several, by what these are called.
_TRIED = {"chunk_size": "chunk_sizes", "k": "ks", "schedule": "schedules"}

#: Options of a plan that a tuning has too.
_SHARED = ("dp", "cp", "pp", "global_batch", "seed", "keep_attention")


def choose(
    analysis: Analysis, values: CliValues, machine: CliValues, *, file: Path | None, saved: Path
) -> tuple[PlanConfig, Tuned]:
    """Choose what the options `values` leave open, tuned for `machine` (fields of `TuneOptions`) or as `file` has it.

    The configuration that is returned has `values`, and of the tuning what these do not say. Where `file` is None, and
    there is the tuning `saved`, of this machine or none is given, it is taken.
    """
    from chunkplan.tuning.document import read_tuning, tuned
    from chunkplan.tuning.document_entries import PLAN_ENTRIES
    from chunkplan.tuning.plan_only import why_plan_only
    from chunkplan.tuning.tune import tune
    from chunkplan_cli.build_options import plan_config

    if "checkpointing" in machine:
        raise UsageError("--checkpointing and --auto exclude each other", hint="--auto chooses it")
    for name in ("memory_tokens", "virtual_stages"):
        if name in values:
            raise UsageError(
                f"--{name.replace('_', '-')} and --auto exclude each other",
                hint="--auto looks at the memory of the GPUs instead; leave one of them out",
            )
    if file is not None:
        _refuse_machine(machine)
    elif saved.is_file() and _is_tuned_for(saved, values, machine):
        file = saved
    if file is not None:
        found = read_tuning(file)
    else:
        tried = {many: (values[one],) for one, many in _TRIED.items() if one in values}
        shared = {name: values[name] for name in _SHARED if name in values}
        options = tune_options(CliValues(machine | shared | tried))
        with tuning_progress() as report_progress:
            found = tuned(tune(analysis, options, progress=report_progress))
    settings = CliValues({name: getattr(found.config, name) for name in (*PLAN_ENTRIES, "global_batch", "seed")})
    if "k" in values:
        del settings["k_by_length"]
    if any(values.get(name, settings[name]) != settings[name] for name in ("pp", "schedule", "virtual_stages")):
        del settings["stage_layers"]  # of other stages than these
    settings |= values
    words = [f"ChunkSize {settings['chunk_size']:,}", f"K {k_words(settings['k'], settings.get('k_by_length'))}"]
    words += [f"dp {settings['dp']}, tp {found.cost.tp}, pp {settings['pp']}", settings["schedule"]]
    words += [] if found.config.cp == "off" else [f"cp {found.config.cp}"]
    words += [] if found.config.split == "full" or "split" in values else [f"split {found.config.split}"]
    words += [trained_words(rank, found.cost.load_in_4bit)] if (rank := found.cost.lora_rank) else []
    words += [found.cost.optimizer] if found.cost.optimizer != "adamw" else []
    words += fused_words(found.cost.fused_kernels, found.cost.compile)
    words += checkpointing_words(found.cost.checkpointing, "full checkpointing")
    words += ["KV offload"] if found.cost.kv_offload else []
    words += [ZERO[found.cost.sharding]] if found.cost.sharding != "optimizer" else []
    note(f"chosen{f' as in {file}' if file else ''}: {', '.join(words)}")
    config = plan_config(settings)
    config.check_layers(found.cost.shape.num_layers, found.cost.shape.name)
    if plan_only := why_plan_only(config, found.cost):
        warn(f"plan only: the runtime cannot run {plan_only} yet")
    if file is not None:
        _compare(analysis, found, config)
    return config, found


def _is_tuned_for(saved: Path, values: CliValues, machine: CliValues) -> bool:
    """Whether a tuning is one of the machine that was given, if any; a note says where it is not."""
    from chunkplan.tuning.document import answers, read_tuning_document

    if not machine:
        return True
    if not values.keys().isdisjoint(_TRIED):
        return False
    options = tune_options(CliValues(machine | {name: values[name] for name in _SHARED if name in values}))
    if answers(read_tuning_document(saved), options):
        return True
    note(f"{saved} was found with other options than these: tuning again")
    return False


def _refuse_machine(machine: CliValues) -> None:
    if machine:
        flag = options_of(TuneOptions)[next(iter(machine))].flag
        raise UsageError(
            f"{flag} and --from exclude each other: the file says what it was tuned for", hint="leave one of them out"
        )


def _compare(analysis: Analysis, found: Tuned, config: PlanConfig) -> None:
    """Say how the data differ from what was tuned for; refuse what would no longer fit."""
    from chunkplan.tuning.drift import find_drift

    drift = find_drift(analysis.num_tokens, found, config)
    if drift.has_drifted:
        warn(
            f"the lengths have drifted: {percent(drift.moved)} of the tokens are in other length classes than when "
            f"tuned, the longest sequence has {drift.longest_now:,} tokens (then {drift.longest_before:,}); tune again"
        )
    if not drift.fits and drift.longest_now <= drift.longest_before:
        raise UsageError(
            f"with these options it would take {gibibytes(drift.memory.total)} a GPU, tuned for "
            f"{gibibytes(drift.gpu_memory)}",
            hint="leave out the options that were not tuned, or run `chunkplan tune` again with them",
        )
    if not drift.fits:
        num_longer = int((analysis.num_tokens > drift.longest_before).sum())
        raise UsageError(
            f"with these lengths it would take {gibibytes(drift.memory.total)} a GPU, tuned for "
            f"{gibibytes(drift.gpu_memory)}: the longest sequence has {drift.longest_now:,} tokens, then "
            f"{drift.longest_before:,}",
            hint=f"run `chunkplan tune` again, or `chunkplan analyze` with --max-length {drift.longest_before}, which "
            f"cuts the end off {counted(num_longer, 'sequence')}",
        )
