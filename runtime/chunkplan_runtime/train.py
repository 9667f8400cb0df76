"""`python -m chunkplan_runtime.train`, or under torchrun: trains a model with a plan.

Options are checked before torch is imported, so that a mistake or a missing extra is told at once.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.planfile.load import load_plan
from chunkplan_runtime.requirements import require_torch
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.options import read_options
from chunkplan_runtime.training.run_folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    config = None
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        config = read_options(arguments, _fail)
        _check_processes(config)
        require_torch()
        from chunkplan_runtime.training.trainer import train

        train(config)
    except KeyboardInterrupt as interrupt:
        left = "nothing was done yet" if config is None else RunFolder(config.output).how_to_resume()
        print(f"stopped; {left}", file=sys.stderr)
        return 143 if isinstance(interrupt, _Terminated) else 130
    except ChunkplanError as error:
        return _fail(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
        return _fail(ChunkplanError(message, hint="check the path, and that the disk has room"))
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


class _Terminated(KeyboardInterrupt):
    """What SIGTERM is here: as Ctrl-C, so that nothing is left half written."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _fail(error: ChunkplanError) -> int:
    print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


def _check_processes(config: TrainConfig) -> None:
    """Refuse more processes than this runtime runs on; first, more or other than the plan has work for."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size == "1":
        return
    dp = load_plan(config.plan).config["dp"]
    uneven = world_size.isdecimal() and int(world_size) > 0 and dp % int(world_size)
    shares = f", which could not even share the plan's {dp} data-parallel ranks evenly" if uneven else ""
    raise UsageError(
        f"this runtime runs on one process, found WORLD_SIZE={world_size}{shares}",
        hint="`torchrun --nproc-per-node 1`; a plan for several data-parallel ranks runs on one process too",
    )


if __name__ == "__main__":
    sys.exit(main())
