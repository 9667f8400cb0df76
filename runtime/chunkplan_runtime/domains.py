"""What options of the runtime may be, without torch, so that a mistake is found at once."""

from __future__ import annotations

import re

from chunkplan.cost.attention_rates import KERNELS
from chunkplan.domains import Domain, text

#: The names that `chunkplan_runtime.attention.kernels` knows; which of them run depends on the machine.
ATTENTION = ("auto", *KERNELS)

DEVICE = Domain(
    lambda value: isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None,
    "auto, cpu, cuda or cuda:N",
    metavar="NAME",
    completed=("auto", "cpu", "cuda"),
)
KERNEL = text("KERNEL", expected="the name of an attention kernel", completed=ATTENTION)

#: What the counts of a load-balancing loss of routers are of; without such a loss the first.
ROUTER_LOSSES = ("none", "batch", "sequence")
NO_ROUTER_LOSS = ROUTER_LOSSES[0]
