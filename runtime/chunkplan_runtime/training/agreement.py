"""All processes of a run have to have been given the same: one that trains on other data would spoil it for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers

from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Plan
from chunkplan.version import __version__
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.exchange import named_processes
from chunkplan_runtime.training.run_folder import shorten


def refuse_other_beginnings(plan: Plan) -> None:
    """Compare the plan of this process, and versions of packages, with those of all others, before there are groups.

    Another plan may be for other groups, and another version may make them otherwise: making them would never end.

    Raises:
        UsageError: naming each process with what it has. All raise it.
    """
    versions = {"chunkplan": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    given: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(given, {**versions, "plan": plan.content_hash})
    for name in given[0]:
        holders: dict[str, list[int]] = {}
        for process, values in enumerate(given):
            holders.setdefault(shorten(values.get(name)), []).append(process)
        if len(holders) > 1:
            found = "; ".join(f"{value} on {named_processes(ranks)}" for value, ranks in holders.items())
            raise UsageError(
                f"the processes do not have the same {name}: {found}",
                hint="start all processes with the same options, files and versions",
            )


def refuse_other_processes(given: Mapping[str, Any], job: Job) -> None:
    """Compare what this process was given, by the name that a message has for it, with what the main one was.

    Raises:
        UsageError: naming a process and what it has of its own. All raise it.
    """
    main, *others = job.all_gather_object(json.loads(json.dumps(given)))
    for process, other in enumerate(others, start=1):
        differ = [name for name in {**main, **other} if other.get(name) != main.get(name)]
        if differ:
            [name, *more] = differ
            raise UsageError(
                f"{job.layout.describe(process)} has {name} {shorten(other.get(name))}, "
                f"process 0 has {shorten(main.get(name))}" + (f"; and {len(more)} more differ" if more else ""),
                hint="start all processes with the same options, files and versions",
            )
