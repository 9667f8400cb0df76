"""Dtypes that follow from others."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over many blocks are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)
