"""The runtime on several processes: groups, stages, links and sharded weights."""
