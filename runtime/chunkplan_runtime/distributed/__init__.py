"""The runtime on several processes: groups, stages, links, sharded weights, and the watch over all of it."""
