"""Sustained rates of a GPU and its links: profiles shipped by name, or read from a file."""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from chunkplan.cost.shape_entries import from_entries
from chunkplan.domains import Domain, one_of
from chunkplan.errors import DataError, UsageError

#: Rates are those of so many queries.
MEASURED_QUERIES = 8192

#: The kernels of the runtime, the preferred one first: by name the module and class in `chunkplan_runtime.attention`.
KERNELS = {
    "torch-cudnn": "flash.TorchCudnnKernel",
    "flash-attn-4": "flash.FlashAttn4Kernel",
    "flash-attn-2": "flash.FlashAttn2Kernel",
    "torch-cuda": "flash.TorchCudaKernel",
    "torch-cpu": "flash.TorchCpuKernel",
    "reference": "reference.ReferenceKernel",
}

#: Those that others stand in for where a chunk has several sequences, a layer a window, or heads are larger.
WHOLE_ONLY = {"torch-cudnn": 128}

#: Those that are left out on several pipeline stages (see `CostModel.on_stages`).
MAKES_PLANS = ("torch-cudnn",)


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """FLOPs a second of an attention kernel in bf16 with heads of `head_size`, of `MEASURED_QUERIES` queries.

    A forward has 4 FLOPs for each element of a head and pair that a query sees, a backward 10. `blocks`: all queries
    see all of four times as many earlier keys. `squares`: a causal mask leaves half of as many keys as queries. A block
    that t queries see takes as long as one of t + `ramp_queries` would at the rate of many.
    """

    kernel: str
    head_size: int
    forward_blocks: float
    forward_squares: float
    backward_blocks: float
    backward_squares: float
    ramp_queries: float

    @property
    def both_blocks(self) -> float:
        """The rate of blocks forward and backward, this counted as two forwards."""
        return 3 / (1 / self.forward_blocks + 2.5 / self.backward_blocks)

    def of_many(self, blocks: float) -> float:
        """The rate of a block that so many queries see that the ramp does not count, by one of `blocks`."""
        return blocks * (1 + self.ramp_queries / MEASURED_QUERIES)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Sustained rates, not those of a data sheet; per second, in FLOPs and bytes.

    `flops` of large matrix products in bf16, `fp32_flops` of those in float32 (without TF32, which torch does not use
    by default), `attention_flops` of a fused attention kernel in bf16, forward and backward together, this counted as
    two forwards; `peak_flops` alone is the data sheet's, for bf16 without sparsity, the base of utilisation.
    `copy_bytes`: read and written by a large copy on the GPU. A matrix product of t tokens takes as long as
    one of t + `ramp_tokens` at the full rate; a kernel takes `kernel_ns` beside its work. `gpu_link_bytes` between the
    `gpus_per_node` GPUs of a node, `node_link_bytes` between nodes, each for one GPU and one direction; a message takes
    `link_ns` beside its bytes. `host_bytes`: to host memory and back, one direction. `memory_bytes` of the GPU, of
    which `reserved_bytes` are taken before the model is loaded.

    The other entries are optional. `launch_ns`: the host's time to launch a kernel, beside the GPU's work; without it
    `kernel_ns` is of both. `attention`: rates by kernel, the preferred one first, and by size of heads; without them
    `attention_flops` is used.
    """

    name: str
    peak_flops: float
    flops: float
    fp32_flops: float
    attention_flops: float
    copy_bytes: float
    ramp_tokens: float
    kernel_ns: float
    gpus_per_node: int
    gpu_link_bytes: float
    node_link_bytes: float
    link_ns: float
    host_bytes: float
    memory_bytes: int
    reserved_bytes: int
    launch_ns: float = 0.0
    attention: tuple[AttentionRates, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def to_dict(self) -> dict[str, object]:
        """The entries of a profile, which JSON can hold; without those that it may leave out where it has none."""
        entries = asdict(self) | {"attention": [asdict(rates) for rates in self.attention]}
        return {name: value for name, value in entries.items() if name not in _OPTIONAL or value}

    def link_bytes(self, gpus: int) -> float:
        """Bytes a second that each of so many GPUs in a row sends another: between nodes by its own link."""
        return self.gpu_link_bytes if gpus <= self.gpus_per_node else self.node_link_bytes

    def ring_bytes(self, ranks: int, tp: int) -> float:
        """Bytes a second of a collective of `ranks` that follow one another and lie `tp` GPUs apart.

        Between nodes its rings leave by the links of all members that a node has (NVIDIA/nccl#412), of which the node
        with the fewest decides; they go no faster than the links within a node.
        """
        if ranks * tp <= self.gpus_per_node:
            return self.gpu_link_bytes
        fewest = max(math.gcd(ranks * tp, self.gpus_per_node) // tp, 1)
        return min(fewest * self.node_link_bytes, self.gpu_link_bytes)


#: The profiles that come with chunkplan, in chunkplan/cost/profiles.
SHIPPED = ("a100", "a6000", "b200", "b300", "gh200", "h100", "h200", "l4", "l40s", "mi300x", "rtx4090", "rtx5090")

#: How far off predictions may be, by what a profile comes from: what was found in docs/cost-model.md, rounded up.
ERRORS = {"measured": 0.10, "calibrated": 0.20, "data sheet": 0.25}

#: The profiles of those that were fitted to what was measured.
_MEASURED = ("h200",)

#: Entries that a profile may leave out: earlier versions did not have them.
_OPTIONAL = ("launch_ns", "attention")

_TABLES = Domain(lambda value: isinstance(value, list | tuple), "a list of tables")

_HINT = "compare it with the profiles that come with chunkplan, chunkplan/cost/profiles/*.toml"


def typed_gpus(count: int, name: str) -> str:
    """GPUs as `--gpus` takes them: with the name of a profile that is shipped."""
    return f"{count}x{name}" if name in SHIPPED else str(count)


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A shipped profile by its name in any case, or one from a TOML file with the entries of `Hardware`.

    Example: `chunkplan.load_hardware("H200").memory_bytes`

    Raises:
        UsageError: there is neither such a profile nor such a file.
        DataError: the file is damaged, or an entry is missing, unknown, or not what it should be.
    """
    shipped = {entry.name.removesuffix(".toml"): entry for entry in (files("chunkplan.cost") / "profiles").iterdir()}
    text = str(name_or_path)
    try:
        source = (shipped.get(text.lower()) or Path(text)).read_bytes()
    except (OSError, ValueError) as error:
        names = ", ".join(sorted(shipped))
        raise UsageError(
            f"{text} is no hardware profile, and no file that can be read", hint=f"name one of {names}, or a TOML file"
        ) from error
    try:
        values = tomllib.loads(source.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a TOML file: {error}", where=text, hint=_HINT) from error
    return hardware_of(values, path="", where=text, hint=_HINT)


def source_of(hardware: Hardware) -> str:
    """The origin of a profile, a key of `ERRORS`; those that are not shipped are made by `chunkplan calibrate`."""
    if hardware.name in _MEASURED:
        return "measured"
    return "data sheet" if hardware.name in SHIPPED else "calibrated"


def hardware_of(values: Any, *, path: str, where: str, hint: str) -> Hardware:
    """The profile of which `Hardware.to_dict` or a TOML file has the entries; `path` names them in errors.

    Raises:
        DataError: an entry is missing, unknown, or not what it should be.
    """
    also = {"attention": _TABLES}
    found = from_entries(Hardware, values, path=path, where=where, hint=hint, optional=_OPTIONAL, also=also)
    inside = f"{path}.attention" if path else "attention"
    tables: dict[tuple[str, int], AttentionRates] = {}
    for place, table in enumerate(found.attention):
        at, kernel = f"{inside}[{place}]", {"kernel": one_of(*KERNELS)}
        rates = from_entries(AttentionRates, table, path=at, where=where, hint=hint, also=kernel)
        if tables.setdefault((rates.kernel, rates.head_size), rates) is not rates:
            what = f"`{at}` is a second table of {rates.kernel} with head_size {rates.head_size}, expected one"
            raise DataError(what, where=where, hint=hint)
    return replace(found, attention=tuple(tables.values()))
