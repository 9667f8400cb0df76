"""What a GPU sustains in attention: by kernel, direction, form and size of heads."""

from __future__ import annotations

from dataclasses import dataclass

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
