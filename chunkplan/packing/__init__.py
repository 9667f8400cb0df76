"""Bin packing of short sequences into chunks, and lower bounds on how few chunks can do."""

from chunkplan.packing.histogram import Packing
from chunkplan.packing.packing import PACKERS, pack_lengths

__all__ = ["PACKERS", "Packing", "pack_lengths"]
