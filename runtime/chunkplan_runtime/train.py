"""`python -m chunkplan_runtime.train`, or under torchrun: trains a model with a plan.

Options are checked before torch is imported, so that a mistake or a missing extra is reported at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from chunkplan.errors import ChunkplanError, UsageError, one_line
from chunkplan.options import options_of, read_settings
from chunkplan_runtime import require_torch, set_environment, world_size
from chunkplan_runtime.training.config import SCORING, TrainConfig
from chunkplan_runtime.training.run_folder import RunFolder

_EXAMPLE = """Example: torchrun --nproc-per-node 8 -m chunkplan_runtime.train \\
  --plan chunkplan-out/plan --model NAME --output chunkplan-out/run"""

#: Seconds in which the main process has said what is wrong with the options.
_PATIENCE = 10

#: Seconds in which processes that are told to stop end a step and write a checkpoint, before they are killed.
_STOPS_WITHIN = 3600


class _Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, handled as Ctrl-C, so that nothing is left half written."""


def main(arguments: list[str] | None = None, config: TrainConfig | None = None, *, scores: bool = False) -> int:
    """Run the command; returns its exit code. Started by torchrun, it is one of the processes of a run.

    `config`: the options, where they were read already. `scores`: it trains nothing, and writes scores of data.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    set_environment()
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = read_options(arguments, scores=scores) if config is None else config
        require_torch()
        from chunkplan_runtime.training.processes import train_alone, train_together

        (train_alone if world_size() == 1 else train_together)(config, scores=scores)
    except KeyboardInterrupt as interrupt:
        if is_main:
            left = "nothing was done yet" if config is None else RunFolder(config.output).how_to_resume()
            left = "run it again: it goes on behind the last file" if scores else left
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


def start(arguments: list[str], num_processes: int, module: str = "train") -> int:
    """Run this module, or that for scores, with `arguments` on as many processes; returns the exit code of the run.

    What went wrong is printed by the processes: of several that fail, the code is that of the first.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # the processes say themselves what torch would say of them here
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_STOPS_WITHIN))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    # A name of this machine need not resolve.
    how = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_processes)]
    try:
        run(parse_args([*how, "-m", f"chunkplan_runtime.{module}", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _fail(error: ChunkplanError) -> int:
    print(f"error: {one_line(str(error))}\nhint: {one_line(error.hint)}", file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise it as every other mistake is raised, rather than print a list of all options."""
        raise UsageError(message, hint=f"`{self.prog} --help` shows what it takes")


def read_options(arguments: list[str] | None, *, scores: bool = False) -> TrainConfig:
    """The configuration that `arguments` (default: those of the process) and the file of their `--config` say.

    Raises:
        UsageError: an option is missing, unknown, or not what it may be; the TOML file is not there, or damaged.
    """
    given = vars(make_parser(scores=scores).parse_args(arguments))
    file = given.pop("config", None)
    values = {**(read_settings(file, TrainConfig, section="train") if file is not None else {}), **given}
    for name, one in options_of(TrainConfig).items():
        if one.is_required and name not in values:
            raise UsageError(f"{one.flag} is missing", hint="give it as a flag, or in the file of --config")
    return TrainConfig(**values)


def make_parser(*, scores: bool = False) -> argparse.ArgumentParser:
    """All flags, as `read_options` reads them; of those of a run that `scores` data."""
    module, model = ("score", "--model NAME") if scores else ("train", "(--model NAME | --model-config FILE)")
    parser = _Parser(
        prog=f"python -m chunkplan_runtime.{module}",
        usage=f"%(prog)s --plan DIR {model} --output DIR [options]",
        description="Write the log-probability of every target token of a plan."
        if scores
        else "Train a model with a plan: gradients equal to those of whole sequences, in chunks.",
        epilog=_EXAMPLE.replace(".train", f".{module}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example that is broken elsewhere cannot be pasted
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    words = "A TOML or YAML file with these options, such as lr = 1e-5; the command line wins."
    parser.add_argument("--config", type=Path, metavar="FILE", help=words)
    declared = [one for name, one in options_of(TrainConfig).items() if not scores or name in SCORING]
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(one.group for one in declared)}
    for one in declared:
        words = one.help + (f" Default: {one.default_words}." if one.default_words else "")
        if one.domain.metavar == "":
            groups[one.group].add_argument(one.flag, action=argparse.BooleanOptionalAction, help=words)
        else:
            metavar = "|".join(one.domain.choices) or one.domain.metavar
            groups[one.group].add_argument(one.flag, type=one.read, metavar=metavar, help=words)
    return parser


if __name__ == "__main__":
    sys.exit(main())
