"""Packed rows in the formats of other trainers: what `export` writes."""
