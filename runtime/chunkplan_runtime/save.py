"""Writes the weights of a model whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan_runtime.models import CausalLM


def check_target(target: Path) -> None:
    """Refuse to replace a folder that is not a saved model; asked before training rather than after.

    Raises:
        UsageError: `target` is a file, or a folder with other things in it.
    """
    if target.exists() and not ((target / "config.json").is_file() or (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(
            f"{target} exists and is not a saved model",
            hint="choose another --output; it would have been replaced as a whole",
        )


def save_model(model: CausalLM, target: Path) -> None:
    """Save weights and config in `target`. A killed run leaves what was there before, or nothing."""
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    try:
        model.model.save_pretrained(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
