"""Work in which chunks keep what attention gives, whatever the plan says."""

from __future__ import annotations

from dataclasses import replace

from chunkplan_runtime.feed.stream import RankWork


def keeping_attention(work: RankWork) -> RankWork:
    """The same where every chunk that runs forward twice keeps attention: one on the host, the next on the device."""
    places = ("host", "gpu")
    again = {action.chunk_id for action in work.actions if action.op == "recompute"}
    kept = {number: replace(work.chunks[number], kept_attention=places[number % 2]) for number in again}
    return replace(work, chunks={**work.chunks, **kept})
