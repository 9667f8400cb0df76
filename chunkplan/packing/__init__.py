"""Bin packing of short sequences into chunks, and lower bounds on how few chunks can do."""

from chunkplan.packing.packing import PACKERS, Packing, pack_lengths

__all__ = ["PACKERS", "Packing", "pack_lengths"]
