"""`python -m chunkplan_runtime.train`, or under torchrun: trains a model with a plan.

Options are checked before torch is imported, so that a mistake or a missing extra is told at once.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import NoReturn

from chunkplan.errors import ChunkplanError, UsageError
from chunkplan_runtime.requirements import require_torch


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        require_torch()
        from chunkplan_runtime.trainer import TrainConfig, train

        train(TrainConfig(**vars(options)))
    except KeyboardInterrupt:
        print("stopped; metrics up to here are kept, weights are not saved", file=sys.stderr)
        return 130
    except ChunkplanError as error:
        return _fail(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
        return _fail(ChunkplanError(message, hint="check the path, and that the disk has room"))
    return 0


def _fail(error: ChunkplanError) -> int:
    print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As every other mistake is told, rather than with all options."""
        sys.exit(_fail(UsageError(message, hint=f"`{self.prog} --help` shows what it takes")))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m chunkplan_runtime.train",
        description="Train a model with a plan: gradients equal to those of whole sequences, in chunks.",
    )
    parser.add_argument("--plan", type=Path, required=True, metavar="DIR", help="the plan, from `chunkplan build`")
    parser.add_argument("--analysis", type=Path, metavar="DIR", help="its analysis, if it is not where it was")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-config", type=Path, metavar="FILE", help="a config.json; weights start random")
    source.add_argument("--model", metavar="NAME", help="a saved model: a folder, or a name on the Hugging Face Hub")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="gets metrics.jsonl and final/")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N steps (default: the whole plan)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random weights (default: 0)")
    parser.add_argument("--lr", type=float, default=1e-4, metavar="X", help="AdamW's learning rate (default: 1e-4)")
    parser.add_argument(
        "--clip", type=float, default=1.0, metavar="X", help="largest gradient norm, 0: any (default: 1)"
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.max_steps is not None and options.max_steps < 1:
        raise UsageError(f"--max-steps is {options.max_steps}", hint="give a whole number from 1")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UsageError(f"--lr is {options.lr}", hint="give a number above 0, such as 1e-4")
    if not (math.isfinite(options.clip) and options.clip >= 0):
        raise UsageError(f"--clip is {options.clip}", hint="give a number above 0, or 0 not to clip")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed is {options.seed}", hint="give a whole number from 0")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise UsageError(
            f"this runtime runs on one process, found WORLD_SIZE={world_size}",
            hint="`torchrun --nproc-per-node 1`; a plan for several data-parallel ranks runs on one process too",
        )


if __name__ == "__main__":
    sys.exit(main())
