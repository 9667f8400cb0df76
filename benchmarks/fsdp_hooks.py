"""Measures what FSDP's hooks take of a forward to look for tensors in its arguments. A minute, on one core.

    python benchmarks/fsdp_hooks.py

A chunk of so many sequences is given to a forward as an argument, and bound to what is run, as the runtime does it.
Hooks look in arguments in every forward and, where gradients pass, make them anew.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from machine import machine
from planning import Row, print_table
from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors

from chunkplan_runtime.feed.stream import ChunkTensors
from chunkplan_runtime.layout import Span

NUM_SPANS = (1, 64, 512)
_TOKENS, _ROUNDS, _CALLS = 8, 9, 20


def seconds(arguments: tuple[object, ...]) -> float:
    """What the hooks take of a forward with `arguments`: of some rounds the fastest."""
    taken = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            found = collect_grad_tensors((arguments, {}))
            replace_grad_tensors((arguments, {}), iter(found))
        taken.append((time.perf_counter() - start) / _CALLS)
    return min(taken)


def main() -> None:
    """Measure and print a table."""
    torch.set_num_threads(1)
    print(machine("torch"))
    rows: list[Row] = []
    for count in NUM_SPANS:
        tokens = torch.zeros(1, _TOKENS * count, dtype=torch.int32)
        spans = tuple(Span(index, 0, _TOKENS, _TOKENS, _TOKENS * index) for index in range(count))
        chunk = ChunkTensors(tokens, tokens, tokens[0], spans)
        hidden = torch.zeros(_TOKENS * count, 8, requires_grad=True)
        given, bound = seconds((print, chunk, hidden)), seconds((partial(print, chunk), hidden))
        rows.append({"sequences": count, "argument, ms": f"{given * 1e3:.3f}", "bound, ms": f"{bound * 1e3:.3f}"})
    print_table("What FSDP's hooks take of a forward", rows)


if __name__ == "__main__":
    main()
