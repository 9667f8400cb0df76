"""Steps that all entries plan: frozen lengths, on several numbers of ranks, token caps, stages and models.

In `whole` steps no sequence is above the cap, and each is on one rank. In `shared` steps ranks may share a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.cost.durations import whole_pairs
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.model import CostModel
from chunkplan.cost.model_config import read_model_config
from chunkplan.planning.sharing import head_degrees

LENGTHS = Path(__file__).parent / "lengths"
POOLS = ("chats", "mixture", "sample")
RANKS = {8: 256, 16: 256, 32: 512, 64: 960}  # and the sequences of a step on them
CAPS = (8_192, 32_768)
STAGES = (1, 4)
MODELS = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-70B")
TRACKS = ("whole", "shared")


@dataclass(frozen=True)
class Step:
    """One step to plan: sequences of `lengths` tokens on `ranks` x `pp` GPUs, at most `cap` tokens of a micro-batch."""

    track: str
    pool: str
    ranks: int
    cap: int
    pp: int
    model: str

    @property
    def name(self) -> str:
        """A word for each choice."""
        return f"{self.track}, {self.pool}, dp {self.ranks}, cap {self.cap}, pp {self.pp}, {self.model.split('/')[1]}"

    @cached_property
    def lengths(self) -> list[int]:
        """The first of its pool that are not too long."""
        limit = self.cap * (self.ranks if self.track == "shared" else 1)
        pool = pool_of(self.pool)
        return pool[pool <= limit][: RANKS[self.ranks]].tolist()

    @property
    def cost(self) -> CostModel:
        """The cost model of its model on H100s, by which every entry is timed."""
        return cost_of(self.model)

    @cached_property
    def work(self) -> list[int]:
        """Time of each sequence on one GPU, without what a micro-batch costs: for planners that ask for weights."""
        return [round(self.time([each], 1) - self.fixed_ns) for each in self.lengths]

    @cached_property
    def fixed_ns(self) -> float:
        """Time of a micro-batch beside its tokens."""
        return self.time([0], 1)

    def time(self, lengths: list[int], size: int, *, exchanges: bool = True) -> float:
        """Time of a micro-batch of sequences of `lengths` on each of the `size` ranks that share it, on one stage.

        That of a chunk in the cost model; what ranks exchange, by heads or by pages, hides behind attention.
        """
        rates, num_layers, tokens = self.cost.rates, self.cost.shape.num_layers, np.array(lengths)
        own, pairs = tokens.sum() / size, whole_pairs(self.cost, tokens).sum()
        seen = pairs / size
        if tokens.size > 1:
            seen = rates.packed[0] * seen + rates.packed[1] * own
        seen += rates.ramp_queries * (tokens.sum() - own)  # slices have fewer queries than keys
        work = sum(rates.of_work(own, seen)) + rates.again.token * own + rates.again.pair * seen
        waits = [0.0]
        if size > 1 and exchanges:
            degrees = [(np.array([size]), np.array([heads])) for heads in head_degrees(size, self.cost)]
            sums = np.array([tokens.sum()]), np.array([0]), np.array([1])
            shared = [exchange_times(self.cost, *sums, *each, attention_pairs=np.array([pairs])) for each in degrees]
            waits = [float((each.forward + each.with_again(rates.again))[0]) for each in shared]
        return float(num_layers * (work + min(waits)) + rates.trained_head * own) + self.cost.chunk_ns


def steps(track: str) -> list[Step]:
    """All steps of a track."""
    return [
        Step(track, pool, ranks, cap, pp, model)
        for pool in POOLS
        for ranks in RANKS
        for cap in CAPS
        for pp in STAGES
        for model in MODELS
    ]


@cache
def pool_of(name: str) -> Int64Array:
    """The lengths of a pool, in the order in which they are taken."""
    return np.loadtxt(LENGTHS / f"{name}.txt", np.int64)


@cache
def cost_of(model: str) -> CostModel:
    """The cost model of a model on H100s."""
    return CostModel(shape=read_model_config(model))


def make_pools() -> None:
    """Write the length files anew, those of `sample_data` from its analysis in chunkplan-out."""
    import chunkplan

    rng = np.random.default_rng(45)
    chats = np.exp(rng.normal(5.5, 1.074, 1200)).clip(16, 32_768).astype(np.int64)
    short = np.exp(rng.normal(6.0, 1.3, 2000)).clip(16, 8_192).astype(np.int64)
    long = (4_096 / (1 - rng.random(400)) ** 0.9).clip(4_096, 262_144).astype(np.int64)
    mixture = rng.permutation(np.concatenate([short, long]))
    sample = rng.permutation(chunkplan.load_analysis("chunkplan-out/analysis").num_tokens)
    for name, values in (("chats", chats), ("mixture", mixture), ("sample", sample)):
        np.savetxt(LENGTHS / f"{name}.txt", values, "%d")
