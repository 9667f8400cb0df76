"""Options of a tuning: a model on GPUs, and the choices to try."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import Literal, NamedTuple

from chunkplan.config.plan import ORDERS_OF_GROUPS, SCHEDULE, VIRTUAL, KeepAttention, PlanConfig
from chunkplan.cost.checkpointing import CHECKPOINTINGS
from chunkplan.cost.fused import FusedKernels
from chunkplan.cost.hardware import Hardware, load_hardware
from chunkplan.cost.model import MACHINE, SHARDINGS, CostModel, Precision, Sharding
from chunkplan.cost.optimizers import Optimizer
from chunkplan.cost.shape import ModelShape
from chunkplan.domains import FLAG, MOST, Domain, number, one_of, several, tokens, whole
from chunkplan.errors import UsageError
from chunkplan.options import UNSET, Advanced, Options, option, options_of, same

CHUNK_SIZES = (
    *(1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 20480, 24576, 32768, 40960, 49152),
    *(65536, 98304, 131072),
)
KS = (1, 2, 4, 8, 16, 32)
_ON_A_PIPELINE = ("auto", "zero-bubble", "zero-bubble-v")

#: More stages than this do not pay, where layouts are chosen.
_MOST_STAGES = 16


class GpuLayout(NamedTuple):
    """A layout of GPUs: dp x tp x pp of them."""

    dp: int
    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """Number of GPUs of the layout."""
        return self.dp * self.tp * self.pp


class MemorySaving(NamedTuple):
    """A way to run a model in less memory than it takes as it is."""

    checkpointing: str
    kv_offload: bool


#: From the fastest to the one that takes least memory.
LADDER = tuple(starmap(MemorySaving, product(CHECKPOINTINGS, (False, True))))


#: Sizes of GPU memory, as people write them.
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _read_size(typed: str) -> int:
    """Bytes of "80GiB". Raises ValueError where it is no size."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)", typed.strip())
    units = {unit.lower(): size for unit, size in _SIZES.items()}
    if not match or match[2].lower() not in units:
        raise ValueError(typed)
    return int(float(match[1]) * units[match[2].lower()])


_SIZE = Domain(
    whole(1).holds, f"a size of memory; units are {', '.join(_SIZES)}", _read_size, metavar="SIZE", example="80GiB"
)

#: Ways to train without chunks that are timed beside the choices.
BASELINES = ("single", "padded", "packed", "zero-3", "context-parallel", "megatron", "cut")

_NUM_GPUS = whole(1, MOST)


def _read_gpus(typed: str) -> dict[str, int | Hardware]:
    """GPUs of "8", and of "8xH100" their hardware too. Raises ValueError where it is neither."""
    if match := re.fullmatch(r"([0-9]+)[xX](.+)", typed):
        return {"gpus": _NUM_GPUS.read(match[1]), "hardware": load_hardware(match[2])}
    return {"gpus": _NUM_GPUS.read(typed)}


_LAYOUT, _TRIED = "Layout of the GPUs", "What is tried"

#: Options that are fields of a cost model too.
_OF_COST_MODEL = ("shape", "precision", "lora_rank", "load_in_4bit", "optimizer", "fused_kernels", "compile")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options):
    """The model, GPUs and batch to tune for, and the choices to try.

    Example: `chunkplan.TuneOptions(gpus="8xH100", lora_rank=16)`

    `gpu_memory` in bytes; `gpus` in all, used in the fastest layout with `tp`, or else `dp`, `tp` and `pp`. The choices
    are all of `chunk_sizes` x `ks` x `schedules` (None: "algorithm2" on one stage, on more "auto", "zero-bubble" and,
    where stages have two layers, "zero-bubble-v"), with and without shared sequences (`cp`) if the schedule allows
    them. `sharding` "auto" shards gradients and weights where that makes room for a faster choice.

    In Python the model and the hardware may be named, and `gpus` may be as they are typed: "8xH100".

    Raises:
        UsageError: a value is out of range.
    """

    shape: ModelShape = same(CostModel, "shape")
    hardware: Hardware = same(CostModel, "hardware")
    gpu_memory: int = option(
        _SIZE,
        "Memory of a GPU, such as 80GiB.",
        group=Advanced(MACHINE),
        depends=lambda options: options.hardware.memory_bytes,
        default_words="the hardware's",
    )
    gpus: int | None = option(
        replace(_NUM_GPUS, read=_read_gpus, metavar="N|NxNAME", example="8xH100"),
        "Number of GPUs, or 8xH100; the fastest layout dp x pp is chosen.",
        group=_LAYOUT,
        default=None,
        fills=("gpus", "hardware"),
    )
    dp: int = same(PlanConfig, "dp", group=Advanced(_LAYOUT))
    tp: int = same(CostModel, "tp", group=Advanced(_LAYOUT))
    pp: int = same(PlanConfig, "pp", group=Advanced(_LAYOUT))
    precision: Precision = same(CostModel, "precision")
    sharding: Sharding | Literal["auto"] = same(
        CostModel,
        "sharding",
        domain=one_of("auto", *SHARDINGS, metavar="WHAT"),
        help="What data-parallel ranks share: none, optimizer (ZeRO-1), gradients (2), weights (3); "
        "auto: the fastest of the last three that fits.",
        default="auto",
        default_words=None,
    )
    lora_rank: int = same(CostModel, "lora_rank")
    load_in_4bit: bool = same(CostModel, "load_in_4bit")
    optimizer: Optimizer = same(CostModel, "optimizer")
    fused_kernels: FusedKernels = same(CostModel, "fused_kernels")
    compile: bool = same(CostModel, "compile")
    gpu_hour_price: float | None = option(
        number(lambda value: value > 0, "a price above 0", metavar="PRICE"),
        "Price of one GPU for one hour, to show the price of an epoch.",
        group=Advanced(MACHINE),
        default=None,
    )
    global_batch: int = same(PlanConfig, "global_batch", group=_TRIED)
    loss: str = same(PlanConfig, "loss", group=Advanced(_TRIED))
    seed: int = same(PlanConfig, "seed", group=Advanced(_TRIED))
    chunk_sizes: tuple[int, ...] = option(
        several(tokens(), metavar="N,N,..."),
        "ChunkSizes to try.",
        group=Advanced(_TRIED),
        default=CHUNK_SIZES,
        default_words=f"{len(CHUNK_SIZES)} from {CHUNK_SIZES[0]} to {CHUNK_SIZES[-1]}",
    )
    ks: tuple[int, ...] = option(several(whole(1, MOST)), "Ks to try.", group=Advanced(_TRIED), default=KS)
    schedules: tuple[str, ...] | None = option(
        several(SCHEDULE),
        "Schedules to try on a pipeline.",
        group=Advanced(_TRIED),
        default=None,
        default_words=", ".join(_ON_A_PIPELINE),
    )

    cp: str | int = same(
        PlanConfig,
        "cp",
        help="Also try plans in which ranks share sequences: auto (as many as pay), N (at most N), or off.",
        group=Advanced(_TRIED),
        default="auto",
        default_words=None,
        depends=None,
    )
    keep_attention: KeepAttention = same(PlanConfig, "keep_attention", group=Advanced(_TRIED))
    baseline: str | None = option(
        one_of(*BASELINES, metavar="NAME"),
        f"What gains are against: {', '.join(BASELINES)}.",
        group=_TRIED,
        default=None,
        default_words="the fastest that fits and loses no token",
    )
    thorough: bool = option(
        FLAG,
        "Simulate every choice, on many steps: minutes, for a few percent at most.",
        group=_TRIED,
        default=False,
    )

    def __post_init__(self) -> None:
        typed: object = self.gpus
        if isinstance(typed, str):
            read = options_of(TuneOptions)["gpus"].read(typed)
            if "hardware" in read and self.hardware is not UNSET:
                raise UsageError(f"gpus is {typed}, and hardware is given too", hint="give one of them")
            for name, value in read.items():
                object.__setattr__(self, name, value)
        super().__post_init__()

    def check_together(self) -> None:
        """Refuse GPUs beside a layout, schedules without a pipeline, and more stages than layers."""
        for name in ("chunk_sizes", "ks"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        if self.gpus is not None and (self.dp, self.pp) != (1, 1):
            raise UsageError("gpus and dp, pp exclude each other", hint="give --gpus without them, or the others")
        if (
            self.baseline in ("context-parallel", "zero-3", "megatron")
            and (self.gpus or self.dp * self.tp * self.pp) < 2
        ):
            raise UsageError(
                f"{self.baseline} takes 2 GPUs or more", hint="give more with --gpus, or another --baseline"
            )
        if self.schedules and all(layout.pp == 1 for layout in self.layouts()):
            raise UsageError("schedules are for pipelines, pp is 1", hint="leave --schedules out, or give --pp")
        shares = [layout for layout in self.layouts() if len(self.ways_of(layout)) > len(self.schedules_of(layout))]
        if isinstance(self.cp, int) and not shares:
            raise UsageError(
                f"cp is {self.cp}, and no layout can have such groups",
                hint="they take several data-parallel ranks, which cp divides, and schedule auto or 1f1b on a pipeline",
            )
        for layout in self.layouts():
            self.cost(layout, LADDER[0], self.shardings_of(layout)[0])
            for schedule in self.schedules_of(layout):
                config = self.plan_config(layout, self.chunk_sizes[0], self.ks[0], schedule)
                config.check_layers(self.shape.num_layers, self.shape.name)

    def layouts(self) -> list[GpuLayout]:
        """List the layouts to try: of `gpus` those with `tp`, as the runtime runs no other than 1.

        Raises:
            UsageError: no layout uses all GPUs.
        """
        if self.gpus is None:
            return [GpuLayout(self.dp, self.tp, self.pp)]
        layouts = self._layouts_of(self.gpus, self.tp)
        if not layouts:
            shared = f" with tp {self.tp}" if self.tp > 1 else ""
            stages = min(_MOST_STAGES, self.shape.num_layers)
            raise UsageError(
                f"{self.gpus} GPUs cannot be used whole{shared}: they are pipelines of up to {stages} stages, and no "
                f"more of these than the {self.global_batch:,} sequences of a step",
                hint="another --gpus, or a larger --global-batch",
            )
        return layouts

    def baseline_layouts(self) -> list[GpuLayout]:
        """List the layouts of baselines, which have tensor parallelism too: within a node."""
        layouts = self.layouts()
        if self.gpus is not None:
            for tp in range(1, self.hardware.gpus_per_node + 1):
                if tp != self.tp and self.shape.num_query_heads % tp == self.shape.num_kv_heads % tp == 0:
                    layouts += self._layouts_of(self.gpus, tp)
        return layouts

    def _layouts_of(self, gpus: int, tp: int) -> list[GpuLayout]:
        """List the layouts that use all of `gpus`."""
        layouts = (GpuLayout(gpus // tp // pp, tp, pp) for pp in range(1, min(_MOST_STAGES, self.shape.num_layers) + 1))
        return [each for each in layouts if each.gpus == gpus and each.dp <= self.global_batch]

    def schedules_of(self, layout: GpuLayout) -> tuple[str, ...]:
        """Return the schedules to try on a layout."""
        if layout.pp == 1:
            return ("algorithm2",)
        if self.schedules:
            return self.schedules
        has_halves = 2 * layout.pp <= self.shape.num_layers
        return tuple(name for name in _ON_A_PIPELINE if has_halves or name not in VIRTUAL)

    def ways_of(self, layout: GpuLayout) -> list[tuple[str, str | int]]:
        """Return the schedules to try on a layout, each without groups of ranks, and with `cp` where that can be."""
        schedules = self.schedules_of(layout)
        shares = self.cp != "off" and layout.dp > 1 and (self.cp == "auto" or layout.dp % int(self.cp) == 0)
        shared = [(schedule, self.cp) for schedule in schedules if shares and schedule in ORDERS_OF_GROUPS]
        return [*((schedule, "off") for schedule in schedules), *shared]

    def shardings_of(self, layout: GpuLayout) -> tuple[Sharding, ...]:
        """Return what data-parallel ranks may share, the least first."""
        if self.sharding != "auto":
            return (self.sharding,)
        return SHARDINGS[1:] if layout.dp > 1 else SHARDINGS[1:2]

    def plan_config(
        self, layout: GpuLayout, chunk_size: int, k: int, schedule: str, cp: str | int = "off"
    ) -> PlanConfig:
        """Return the configuration of a plan."""
        return PlanConfig(
            chunk_size=chunk_size,
            k=k,
            global_batch=self.global_batch,
            dp=layout.dp,
            cp=cp,
            pp=layout.pp,
            schedule=schedule,
            seed=self.seed,
            keep_attention=self.keep_attention,
            loss=self.loss,
        )

    @property
    def gpu(self) -> Hardware:
        """The hardware, with the memory that is tuned for."""
        return replace(self.hardware, memory_bytes=self.gpu_memory)

    def cost(self, layout: GpuLayout, memory: MemorySaving, sharding: Sharding = "optimizer") -> CostModel:
        """Return the cost model of a layout, a way to save memory, and what ranks share."""
        stated = {name: getattr(self, name) for name in _OF_COST_MODEL}
        return CostModel(
            **stated,
            hardware=self.gpu,
            tp=layout.tp,
            checkpointing=memory.checkpointing,
            kv_offload=memory.kv_offload,
            sharding=sharding,
        ).on_stages(layout.pp)
