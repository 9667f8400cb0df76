"""`python -m chunkplan_runtime.train`, or under torchrun: trains a model with a plan.

Options are checked before torch is imported, so that a mistake or a missing extra is reported at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from chunkplan.errors import ChunkplanError
from chunkplan.visible import one_line
from chunkplan_runtime.requirements import require_torch, set_for_several_processes
from chunkplan_runtime.training.options import is_main_process, read_options
from chunkplan_runtime.training.run_folder import RunFolder

#: What is set before torch is imported, unless it is set already. Else torch prints a page of its C++ stack
#: about a process that is gone.
_ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

#: How torch takes memory on a GPU, under both of its names: a chunk takes what others of other sizes have given back.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

#: Seconds in which the main process has said what is wrong with the options.
_PATIENCE = 10


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code. Started by torchrun, it is one of the processes of a run."""
    config = None
    before = signal.signal(signal.SIGTERM, _terminate)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        set_for_several_processes()
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    try:
        config = read_options(arguments, _fail_once)
        require_torch()
        from chunkplan_runtime.distributed.launch import train_alone, train_together, world_size

        (train_alone if world_size() == 1 else train_together)(config)
    except KeyboardInterrupt as interrupt:
        if is_main_process():
            left = "nothing was done yet" if config is None else RunFolder(config.output).how_to_resume()
            print(one_line(f"stopped; {left}"), file=sys.stderr)
        return 143 if isinstance(interrupt, _Terminated) else 130
    except ChunkplanError as error:
        return _fail_once(error) if config is None else _fail(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
        return _fail(ChunkplanError(message, hint="check the path, and that the disk has room"))
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _fail_once(error: ChunkplanError) -> int:
    """Leave what all processes find alike to the main one, which their launcher lets end the others."""
    if not is_main_process():
        try:
            time.sleep(_PATIENCE)
        except KeyboardInterrupt:
            return error.exit_code
    return _fail(error)


class _Terminated(KeyboardInterrupt):
    """What SIGTERM is here: as Ctrl-C, so that nothing is left half written."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _fail(error: ChunkplanError) -> int:
    print(f"error: {one_line(str(error))}\nhint: {one_line(error.hint)}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
