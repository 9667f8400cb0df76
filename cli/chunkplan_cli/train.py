"""`chunkplan train`: trains with the plan of the workspace, on as many processes as it is for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkplan.domains import MOST, path, whole
from chunkplan.errors import UsageError
from chunkplan.options import Options, option, options_of, read_settings, same
from chunkplan.quantities import counted
from chunkplan_cli.declared import OPTIONS, CliValues, WorkspaceOption, find_plan, output_option, takes
from chunkplan_cli.simulate import MEASURED, TIMELINE, show_run
from chunkplan_cli.terminal import note
from chunkplan_runtime.training.config import SCORING, TrainConfig

if TYPE_CHECKING:
    from chunkplan.planfile.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StartOptions(Options):
    """Options of the plan to train with, the folder of the run, and the start."""

    plan: Path | None = same(TrainConfig, "plan", group=OPTIONS, default=None, default_words="WORKSPACE/plan")
    output: Path | None = same(TrainConfig, "output", group=OPTIONS, default=None, default_words="WORKSPACE/run")
    config: Path | None = option(
        path("FILE"),
        "A TOML or YAML file with these options, such as recipes/qwen2.5-7b.yaml; the command line wins.",
        group=OPTIONS,
        default=None,
    )
    nproc: int | None = option(
        whole(1, MOST),
        "Processes on this machine.",
        group=OPTIONS,
        default=None,
        default_words="one for each GPU of the plan (dp x pp)",
    )


#: Options of a run, beside those with a default here.
_FLAGS = tuple(name for name in options_of(TrainConfig) if name not in ("plan", "output"))


@takes(how=StartOptions, run=(TrainConfig, _FLAGS))
def train(*, run: CliValues, how: CliValues, workspace: WorkspaceOption = None) -> None:
    """Train a model with a plan: gradients equal to those of whole sequences, in chunks.

    Starts as many processes on this machine as the plan needs. On several machines, run `torchrun -m
    chunkplan_runtime.train` with the same options. `parity` shows that the gradients of a model are exact.

    Example: chunkplan train --model path/to/model --lr 1e-5
    """
    from chunkplan.workspace import Workspace

    options, place = StartOptions(**how), Workspace.find(workspace)
    values = {**(read_settings(options.config, TrainConfig, section="train") if options.config else {}), **run}
    plan = find_plan(options.plan or values.get("plan"), place, "--plan")
    output = options.output or values.get("output") or place.run
    config = TrainConfig(**{**values, "plan": plan, "output": output})
    in_file = ["--config", str(options.config)] if options.config else []
    code = _start(config, options.nproc, [*in_file, *_typed(run)])
    if code == 0 and find_spec("numba") and (output / MEASURED).exists():  # a run trains without it
        show_run(output, output / TIMELINE)
    raise typer.Exit(code)


@takes(how=(StartOptions, ("plan", "nproc")), run=(TrainConfig, tuple(name for name in _FLAGS if name in SCORING)))
def score(
    *,
    run: CliValues,
    how: CliValues,
    output: Annotated[Path | None, output_option("Folder of the Parquet files. Default: WORKSPACE/scores.")] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Write the log-probability of every target token of a plan to Parquet, by forwards alone.

    For reference models, perplexity and filters, of sequences of any length. Of a plan of several epochs the first one
    is scored. A run that stopped goes on when it is started again. On several machines, run `torchrun -m
    chunkplan_runtime.score` with the same options.

    Example: chunkplan score --model path/to/model
    """
    from chunkplan.workspace import Workspace

    options, place = StartOptions(**how), Workspace.find(workspace)
    where = {"plan": find_plan(options.plan, place, "--plan"), "output": output or place.root / "scores"}
    config = TrainConfig(**{**run, **where})
    raise typer.Exit(_start(config, options.nproc, _typed(run), module="score"))


def _start(config: TrainConfig, nproc: int | None, words: Sequence[str], module: str = "train") -> int:
    """Run `module` here, or with the options `words` on as many processes as asked for; returns the exit code."""
    from chunkplan.planfile.load import load_plan
    from chunkplan_runtime import require_torch
    from chunkplan_runtime.layout import choose_layout
    from chunkplan_runtime.train import main, start

    require_torch()
    from torch import cuda

    loaded = load_plan(config.plan)
    count = nproc or loaded.config.dp * loaded.config.pp
    choose_layout(loaded, count, 0)  # refused now if it cannot be
    if config.device != "cpu":
        refuse_few_gpus(loaded, count, cuda.device_count())
    if count == 1:
        return main(config=config, scores=module == "score")
    arguments = ["--plan", str(config.plan), "--output", str(config.output), *words]
    processes = ["torchrun", "--nproc-per-node", str(count), "-m", f"chunkplan_runtime.{module}"]
    note(f"started as: {shlex.join([*processes, *arguments])}")
    return start(arguments, count, module)


def refuse_few_gpus(plan: Plan, num_processes: int, available: int) -> None:
    """Raise UsageError where so many processes have fewer GPUs; a machine without any trains on its CPU."""
    from chunkplan_runtime.layout import choose_layout

    if not 0 < available < num_processes:
        return
    hint = f"`chunkplan train --nproc {available}` runs the plan's ranks in turn"
    try:
        choose_layout(plan, available, 0)
    except UsageError as error:
        hint = error.hint
    raise UsageError(
        f"{num_processes} processes take a GPU each, this machine has {counted(available, 'GPU')}",
        where=str(plan.path),
        hint=f"{hint}; on several machines run `torchrun -m chunkplan_runtime.train` with its --nnodes",
    )


def _typed(run: CliValues) -> list[str]:
    """The flags of a run as they are typed, for the processes that torchrun starts."""
    words = []
    for name, value in run.items():
        flag = options_of(TrainConfig)[name].flag
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, run.typed[name]]
    return words
