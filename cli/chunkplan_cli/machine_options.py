"""What the options of a model and of GPUs mean together."""

from __future__ import annotations

from pathlib import Path

from chunkplan.cost.model_config import config_file
from chunkplan.errors import UsageError
from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.declared import Given


def tune_options(asked: Given) -> TuneOptions:
    """Make the options of a tuning; what is not given takes its default."""
    if "gpus" in asked and not asked.keys().isdisjoint({"dp", "pp"}):
        raise UsageError("--gpus and --dp, --pp exclude each other", hint="give --gpus without them, or the others")
    return TuneOptions(**asked)


def files_read(machine: Given) -> tuple[Path | str, ...]:
    """Return the files behind a model and a hardware profile that were given, which nothing may be written over."""
    model, hardware = machine.typed.get("shape"), machine.typed.get("hardware")
    return (*([config_file(Path(model))] if model else []), *([hardware] if hardware else []))
