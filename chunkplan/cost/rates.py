"""What a layer of a model takes on a GPU: what every predicted time is made of."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Nanoseconds of a forward through one layer: a token, a square, and whatever a chunk takes beside these.

    `squares` of a segment of t tokens that sees p earlier ones are t (2 p + t), twice the pairs of a query and a key
    under a causal mask. `head` is a token's in the vocabulary head, on the last model part only. `layer_passes`: a
    backward takes as long as that many forwards of its layers (2, and 1 more where layers are recomputed inside it).
    `link_token` and `link` are a token's and a message's between two stages. `gather` is what fetching the weights of a
    layer takes where they are sharded: it goes on beside the work of the layer before, so nothing takes less.
    """

    token: float
    square: float
    chunk: float
    head: float = 0.0
    layer_passes: int = 2
    link_token: float = 0.0
    link: float = 0.0
    gather: float = 0.0


#: Forward 1 and backward 2 a token on every model part, of one layer each, and nothing for links.
UNIT = Rates(token=1.0, square=0.0, chunk=0.0)
