"""Models of transformers as stages of a pipeline, and what is refused of them."""

#: What the counts of a load-balancing loss of routers are of; without such a loss the first.
ROUTER_LOSSES = ("none", "batch", "sequence")
