"""The label of every position of a sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: The label of a position that predicts nothing.
NO_TARGET = -100


def shifted_labels(input_ids: npt.NDArray[np.int32], target: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The label of every position of a sequence: the next token where that is a target, else `NO_TARGET`.

    The last position has none. For a segment, give one token more than it has: the target across its border counts.
    """
    labels = np.full(len(input_ids), NO_TARGET, np.int32)
    np.copyto(labels[:-1], input_ids[1:], where=target[1:])
    return labels
