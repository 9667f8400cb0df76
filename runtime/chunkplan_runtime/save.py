"""Writes the weights of a model whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from chunkplan_runtime.models import CausalLM


def save_model(model: CausalLM, target: Path) -> None:
    """Save weights and config in `target`, which is not there yet. A killed run leaves nothing under that name."""
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        model.model.save_pretrained(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
