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
from chunkplan_runtime.requirements import require_torch, set_environment
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.options import read_options
from chunkplan_runtime.training.run_folder import RunFolder

#: Seconds in which the main process has said what is wrong with the options.
_PATIENCE = 10


class _Terminated(KeyboardInterrupt):
    """What SIGTERM is here: as Ctrl-C, so that nothing is left half written."""


def main(arguments: list[str] | None = None, config: TrainConfig | None = None) -> int:
    """Run the command; returns its exit code. Started by torchrun, it is one of the processes of a run.

    `config`: the options, where they were read already.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    set_environment()
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = read_options(arguments) if config is None else config
        require_torch()
        from chunkplan_runtime.distributed.launch import world_size
        from chunkplan_runtime.training.processes import train_alone, train_together

        (train_alone if world_size() == 1 else train_together)(config)
    except KeyboardInterrupt as interrupt:
        if is_main:
            left = "nothing was done yet" if config is None else RunFolder(config.output).how_to_resume()
            print(one_line(f"stopped; {left}"), file=sys.stderr)
        return 143 if isinstance(interrupt, _Terminated) else 130
    except ChunkplanError as error:
        if config is None and not is_main:  # all find it alike: the main one says it, and the launcher ends the others
            try:
                time.sleep(_PATIENCE)
            except KeyboardInterrupt:
                return error.exit_code
        return _fail(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
        return _fail(ChunkplanError(message, hint="check the path, and that the disk has room"))
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _fail(error: ChunkplanError) -> int:
    print(f"error: {one_line(str(error))}\nhint: {one_line(error.hint)}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
