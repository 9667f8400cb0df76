"""A `SequencePacker` for `nemo_rl.data.packing` of NeMo-RL, put in place of its packers by `install()`."""

from __future__ import annotations

from typing import Any

from nemo_rl.data.packing import algorithms

from chunkplan.adapters.balance import spread, token_counts
from chunkplan.packing import pack_lengths


class ChunkplanPacker(algorithms.SequencePacker):  # type: ignore[misc]
    """Packs into as few bins as are found, which is mostly proved to be the fewest, then evens their tokens out.

    Raises:
        ValueError: by `pack`: a length is no whole number from 1 to that of a bin, or there are too few for the bins.
    """

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        self._validate_sequence_lengths(sequence_lengths)
        if not sequence_lengths:
            return []
        lengths = token_counts(sequence_lengths)
        packing = pack_lengths(lengths, self.bin_capacity, certify=False)
        count = max(packing.num_bins, self.min_bin_count or 0)
        count += -count % (self.bin_count_multiple or 1)
        if count > lengths.size:
            raise ValueError(f"Cannot create {count} bins with only {lengths.size} sequences; use more, or fewer bins")
        return spread(sequence_lengths, sequence_lengths, count, self.bin_capacity)


def get_packer(algorithm: Any, bin_capacity: int, *args: Any, **kwargs: Any) -> algorithms.SequencePacker:
    """`ChunkplanPacker`, whichever algorithm is asked for; the arguments are those of NeMo-RL's `get_packer`."""
    _GET_PACKER(algorithm, bin_capacity, *args, **kwargs)  # refuses what NeMo-RL refuses
    return ChunkplanPacker(bin_capacity, *args, **kwargs)


_GET_PACKER = algorithms.get_packer


def install() -> None:
    """Put `get_packer` in place of NeMo-RL's: call it before a policy is made."""
    from nemo_rl.data import packing

    algorithms.get_packer = packing.get_packer = get_packer
