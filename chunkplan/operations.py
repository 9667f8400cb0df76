"""Operations of a stage on a chunk: their names in files, and their codes."""

from __future__ import annotations

#: What a stage does with a chunk. `forward` keeps activations; `forward_kv` leaves only keys, values and the stage's
#: input behind; `backward_input` and `backward_weight` are the halves of a split backward.
OPS = ("forward", "forward_kv", "recompute", "backward", "backward_input", "backward_weight")

#: What sends hidden states on to the next stage, and what sends their gradient back: a split backward by its first
#: half.
FORWARDS = ("forward", "forward_kv")
BACKWARDS = ("backward", "backward_input")

#: Where a chunk that goes `forward_kv` first keeps what attention gave then, for its `recompute`: nowhere, on the GPU,
#: or in host memory. Arrays have the places of these.
KEPT_ATTENTION = ("", "gpu", "host")
NOT_KEPT, ON_GPU, ON_HOST = range(3)

#: By what ranks share beside optimizer states, the op of the slot in which all of a stage meet for an op: where it is
#: weights, all that goes through layers fetches them, a `forward` from the first to the last, a `backward_input` from
#: the last to the first; a `backward` sums gradients besides, as a `backward_weight` does without fetching. Where it is
#: gradients, sums are all that there is.
MEETINGS = {
    "gradients": {"backward": "backward_weight", "backward_weight": "backward_weight"},
    "weights": {**dict(zip(OPS, OPS, strict=True)), "forward_kv": "forward", "recompute": "forward"},
}
