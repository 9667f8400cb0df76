"""What is tuned for: a model on GPUs, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from chunkplan.building import check_stages
from chunkplan.cost.hardware import Hardware
from chunkplan.cost.memory import Sharding
from chunkplan.cost.model import Checkpointing, CostModel, Precision
from chunkplan.cost.shape import ModelShape
from chunkplan.errors import HELP_HINT, UsageError
from chunkplan.planning.config import PlanConfig

CHUNK_SIZES = tuple(
    factor << 10 for factor in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128)
)
KS = (1, 2, 4, 8, 16, 32)

#: Tensor parallelism beyond the GPUs of a node does not pay, nor do more stages than this where layouts are chosen.
_MOST_STAGES = 16


class Layout(NamedTuple):
    """How GPUs are used: dp x tp x pp of them."""

    dp: int
    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """All together."""
        return self.dp * self.tp * self.pp


class Memory(NamedTuple):
    """A way to run a model in less memory than it takes as it is."""

    checkpointing: Checkpointing
    kv_offload: bool


#: From the fastest to the one that takes least memory.
LADDER = (Memory("none", False), Memory("none", True), Memory("full", False), Memory("full", True))


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune for.

    `gpu_memory` in bytes; `gpus` in all, used in whichever layout is fastest, or else `dp`, `tp` and `pp`; `sharding`
    over data-parallel ranks. Tried are all of `chunk_sizes` x `ks` x `schedules` (None: "algorithm2" on one stage,
    "1f1b" and "zero-bubble" on more).

    Raises:
        UsageError: a value is out of range.
    """

    shape: ModelShape
    hardware: Hardware
    gpu_memory: int
    gpus: int | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    precision: Precision = "bf16"
    sharding: Sharding = "optimizer"
    global_batch: int = 256
    seed: int = 0
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES
    ks: tuple[int, ...] = KS
    schedules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_sizes", "ks"):
            values = getattr(self, name)
            if not values or any(type(value) is not int or value < 1 for value in values):
                raise _refusal(name, values, "whole numbers from 1")
            object.__setattr__(self, name, tuple(sorted(set(values))))
        for name in ("gpu_memory", "gpus", "dp", "tp", "pp", "global_batch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise _refusal(name, value, "a whole number from 1")
        if self.gpus is not None and (self.dp, self.tp, self.pp) != (1, 1, 1):
            raise UsageError("gpus and dp, tp, pp exclude each other", hint="give --gpus alone, or the others")
        if self.schedules and all(layout.pp == 1 for layout in self.layouts()):
            raise UsageError("schedules are for pipelines, pp is 1", hint="leave --schedules out, or give --pp")
        for layout in self.layouts():
            cost = self.cost(layout, LADDER[0])
            for schedule in self.schedules_of(layout):
                check_stages(self.plan_config(layout, self.chunk_sizes[0], self.ks[0], schedule), cost)

    def layouts(self) -> list[Layout]:
        """The layouts to try."""
        if self.gpus is None:
            return [Layout(self.dp, self.tp, self.pp)]
        layouts = []
        for tp in range(1, self.hardware.gpus_per_node + 1):
            if self.gpus % tp or self.shape.num_query_heads % tp or self.shape.num_kv_heads % tp:
                continue
            for pp in range(1, min(_MOST_STAGES, self.shape.num_layers) + 1):
                dp = self.gpus // tp // pp
                if dp * tp * pp == self.gpus and dp <= self.global_batch:
                    layouts.append(Layout(dp, tp, pp))
        if not layouts:
            raise UsageError(f"{self.gpus} GPUs cannot be used whole", hint="give --dp, --tp and --pp instead")
        return layouts

    def schedules_of(self, layout: Layout) -> tuple[str, ...]:
        """The schedules to try on a layout."""
        if layout.pp == 1:
            return ("algorithm2",)
        return self.schedules or ("1f1b", "zero-bubble")

    def plan_config(
        self,
        layout: Layout,
        chunk_size: int,
        k: int,
        schedule: str,
        k_by_length: tuple[tuple[int, int], ...] | None = None,
    ) -> PlanConfig:
        """A plan's configuration; ranks that share the weights fetch them together, and so have equally many chunks."""
        return PlanConfig(
            chunk_size=chunk_size,
            k=k,
            k_by_length=k_by_length,
            global_batch=self.global_batch,
            dp=layout.dp,
            pp=layout.pp,
            schedule=schedule,
            seed=self.seed,
            equal_chunks=self.sharding == "weights" and layout.dp > 1,
        )

    def cost(self, layout: Layout, memory: Memory) -> CostModel:
        """What it costs."""
        return CostModel(
            shape=self.shape,
            hardware=self.hardware,
            tp=layout.tp,
            precision=self.precision,
            checkpointing=memory.checkpointing,
            kv_offload=memory.kv_offload,
            weight_shards=layout.dp if self.sharding == "weights" else 1,
        )


def _refusal(name: str, value: object, expected: str) -> UsageError:
    return UsageError(
        f"{name.replace('_', '-')} is {value!r}, expected {expected}",
        hint=HELP_HINT,
    )
