"""What processes do in tests of distributed training: the trainer, as torchrun would start it on each of them."""

from __future__ import annotations

import contextlib
import io
import os

import pandas  # noqa: F401  # which pyarrow imports as soon as it is there
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import chunkplan_runtime.training.processes  # noqa: F401  # all that a run imports, before processes are forked
from chunkplan_runtime.train import main


def run_main(rank: int, *, size: int, port: int, arguments: list[list[str]]) -> tuple[int, str]:
    """One command line for all, or one for each: (exit code, stderr)."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            code = main(arguments[min(rank, len(arguments) - 1)])
        except SystemExit as end:
            code = int(str(end.code))
    return code, told.getvalue()
