"""All processes of a run have to have been given the same: one that trains on other data would spoil it for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from chunkplan.errors import UsageError
from chunkplan.version import __version__
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.training.run_folder import shorten


def versions() -> dict[str, str]:
    """The versions of the packages whose numbers a run has, by package."""
    return {"chunkplan": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def refuse_other_processes(given: Mapping[str, Any], job: Job) -> None:
    """Compare what this process was given, by the name that a message has for it, with what the main one was.

    Raises:
        UsageError: naming a process and what it has of its own. All raise it.
    """
    main, *others = job.all_gather_object(json.loads(json.dumps(given)))
    for rank, other in enumerate(others, start=1):
        differ = [name for name in {**main, **other} if other.get(name) != main.get(name)]
        if differ:
            [name, *more] = differ
            raise UsageError(
                f"{job.layout.describe(rank)} has {name} {shorten(other.get(name))}, "
                f"process 0 has {shorten(main.get(name))}" + (f"; and {len(more)} more differ" if more else ""),
                hint="start all processes with the same options, files and versions",
            )
