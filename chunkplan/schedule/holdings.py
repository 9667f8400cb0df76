"""Memory of a stage after each of its actions, in tokens: activations, inputs, attention, KV, and pending backwards.

`CHANGES` says what every op adds and releases; peaks of memory and the counters of a trace are read off it.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled, compiled_in_place, copy_to
from chunkplan.cost.durations import Float64Array
from chunkplan.cost.token_bytes import MemoryRates
from chunkplan.operations import ON_GPU, ON_HOST, OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.schedule.actions import BACKWARD, BACKWARD_INPUT, Actions, unit_end

#: Kinds of resident tokens, in the order of `cost.token_bytes.ResidentTokens`: with activations; with saved inputs;
#: with keys and values; between the halves of their backward, which hold what the weight half needs in place of their
#: activations, and also count as tokens with activations; with attention kept on the GPU, and in host memory. In
#: `peak_snapshots` alone: tokens of a chunk with only one layer's activations left, and tokens for whose keys and
#: values all layers have gradients.
ACTIVATIONS, INPUTS, KV, PENDING, ATTENTION, ATTENTION_ON_HOST, LAST_LAYER, KV_GRADIENTS = range(8)

#: When it changes.
START, END = range(2)

_CHANGES = {
    # op: activations, inputs, KV, pending, attention, from the start of the action on; and from its end on
    "forward": ((1, 0, 1, 0, 0), (0, 0, 0, 0, 0)),
    "forward_kv": ((0, 1, 1, 0, 1), (0, 0, 0, 0, 0)),
    "recompute": ((1, -1, 0, 0, -1), (0, 0, 0, 0, 0)),
    "backward": ((0, 0, 0, 0, 0), (-1, 0, -1, 0, 0)),
    "backward_input": ((0, 0, 0, 1, 0), (0, 0, -1, 0, 0)),
    "backward_weight": ((0, 0, 0, 0, 0), (-1, 0, 0, -1, 0)),
}

#: int64 [num_ops, 2, 5], by code of the op, `START` or `END`, and what is held: whether its chunk's tokens come (1) or
#: go (-1). Inputs are not saved on model stage 0, which needs but the token ids. Keys and values are counted for parts
#: of split sequences alone, once whatever the virtual stages; those of a group go together, with the backward of its
#: first chunk, which is the last to be done. Attention is that of chunks that keep it.
CHANGES = np.array([_CHANGES[op] for op in OPS], np.int64)


@compiled
def kv_tokens(chunks: Chunks) -> Int64Array:
    """The tokens whose keys and values come and go with each chunk, int64 [2, n], by `START` and `END`.

    With every chunk of a group come its own; with the first one go those of the whole group, unless it is a tree: then
    each chunk's own go with it.
    """
    tokens = np.zeros((2, chunks.num_tokens.size), np.int64)  # [2, n]
    for rank in range(chunks.rank_chunks.size - 1):
        start, end = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
        while start < end:
            stop = min(unit_end(chunks.group_id, start), end)
            if chunks.group_id[start] >= 0:
                copy_to(tokens[START, start:stop], chunks.num_tokens[start:stop])
                if np.all(chunks.last_dependent[start:stop] == stop - start - 1):
                    tokens[END, start] = np.sum(tokens[START, start:stop])
                else:
                    copy_to(tokens[END, start:stop], chunks.num_tokens[start:stop])
            start = stop
    return tokens


@compiled
def stage_holdings(
    chunks: Chunks, kv: Int64Array, actions: Actions, rank: int, stage: int, num_stages: int
) -> Int64Array:
    """Tokens that one of the `num_stages` of a rank holds: int64 [actions of the stage, 2, 6], see `CHANGES`.

    A chunk's activations, its input and its attention count for each virtual stage that holds them. `kv`: the
    `kv_tokens` of `chunks`.
    """
    row = rank * num_stages + stage
    start, stop = actions.stages[row], actions.stages[row + 1]
    held = np.empty((stop - start, 2, 6), np.int64)  # [actions of the stage, 2, 6]
    now, comes = np.zeros(6, np.int64), np.empty(6, np.int64)  # what is held, and what comes or goes with a chunk
    for action in range(start, stop):
        op, chunk = actions.ops[action], chunks.rank_chunks[rank] + actions.chunk_ids[action]
        tokens, virtual_stage = np.int64(chunks.num_tokens[chunk]), actions.virtual_stages[action]
        comes[:] = tokens
        comes[INPUTS] *= stage > 0 or virtual_stage > 0
        comes[ATTENTION] *= chunks.kept_attention[chunk] == ON_GPU
        comes[ATTENTION_ON_HOST] *= chunks.kept_attention[chunk] == ON_HOST
        for when in range(2):
            comes[KV] = kv[when, chunk] if virtual_stage == 0 else 0
            for kind in range(6):
                now[kind] += CHANGES[op, when, min(kind, ATTENTION)] * comes[kind]
            copy_to(held[action - start, when], now)
    return held


@compiled
def peak_retained(chunks: Chunks, actions: Actions) -> Int64Array:
    """The most tokens whose activations each stage of some ranks retains at any time, int64 [num_ranks * pp]."""
    pp = (actions.stages.size - 1) // (chunks.rank_chunks.size - 1)
    kv = kv_tokens(chunks)
    peaks = np.zeros(actions.stages.size - 1, np.int64)
    for row in range(peaks.size):
        held = stage_holdings(chunks, kv, actions, row // pp, row % pp, pp)
        for action in range(held.shape[0]):
            peaks[row] = max(peaks[row], held[action, START, ACTIVATIONS])
    return peaks


@compiled
def stage_snapshots(
    chunks: Chunks, kv: Int64Array, actions: Actions, rank: int, stage: int, num_stages: int
) -> Int64Array:
    """Tokens that a stage holds at the start of each of its actions: int64 [actions of the stage, 2, 8].

    The backward of the last chunk of a group allocates the gradients of all its keys and values, layer by layer, and
    frees the activations of that chunk meanwhile: such a backward has its end as well, others zeros there. In a tree
    that of each chunk allocates those of the keys and values that it attends to, where there are none yet.
    """
    first_chunk, first_action = chunks.rank_chunks[rank], actions.stages[rank * num_stages + stage]
    held = stage_holdings(chunks, kv, actions, rank, stage, num_stages)
    found = np.zeros((held.shape[0], 2, 8), np.int64)
    has_gradients = np.zeros(chunks.rank_chunks[rank + 1] - first_chunk, np.bool_)
    num_gradients = np.int64(0)
    for action in range(held.shape[0]):
        op, chunk = actions.ops[first_action + action], actions.chunk_ids[first_action + action]
        copy_to(found[action, START, :LAST_LAYER], held[action, START])
        found[action, START, KV_GRADIENTS] = num_gradients
        is_backward = op in (BACKWARD, BACKWARD_INPUT)
        if is_backward and kv[START, first_chunk + chunk] > 0 and not has_gradients[chunk]:
            num_gradients += _mark_group(kv[:, first_chunk:], chunk, has_gradients)
            index = chunks.group_index[first_chunk + chunk]
            for other in range(chunk - index, chunk):  # of a tree, those that it depends on
                if not has_gradients[other] and chunks.last_dependent[first_chunk + other] >= index:
                    has_gradients[other] = True
                    num_gradients += kv[END, first_chunk + other]
            copy_to(found[action, END], found[action, START])
            found[action, END, KV_GRADIENTS] = num_gradients
            if op == BACKWARD:
                found[action, END, ACTIVATIONS] -= chunks.num_tokens[first_chunk + chunk]
                found[action, END, LAST_LAYER] = chunks.num_tokens[first_chunk + chunk]
        num_gradients -= held[action, START, KV] - held[action, END, KV]
    return found


@compiled
def peak_snapshots(chunks: Chunks, actions: Actions, memory_rates: MemoryRates) -> Int64Array:
    """The one of the `stage_snapshots` of each stage of many ranks with most bytes: int64 [num_ranks, pp, 8].

    `memory_rates`: bytes of each stage by tokens of each kind.
    """
    num_ranks, pp = chunks.rank_chunks.size - 1, memory_rates.tokens.shape[0]
    kv = kv_tokens(chunks)
    snapshots = np.zeros((num_ranks, pp, 8), np.int64)
    for rank in range(num_ranks):
        for stage in range(pp):
            found = stage_snapshots(chunks, kv, actions, rank, stage, pp)
            on_host, most = np.int64(0), -1.0
            for action in range(found.shape[0]):
                on_host = max(on_host, found[action, START, ATTENTION_ON_HOST])
                for when in range(1 + (found[action, END, KV_GRADIENTS] > 0)):
                    num_bytes = _bytes_of_snapshot(found[action, when], memory_rates, stage)
                    if num_bytes > most:
                        most = num_bytes
                        copy_to(snapshots[rank, stage], found[action, when])
            snapshots[rank, stage, ATTENTION_ON_HOST] = on_host
    return snapshots


@compiled_in_place
def _mark_group(kv: Int64Array, last: int, is_marked: BoolArray) -> int:
    """Mark the chunks of the group whose last one is `last`; returns their tokens. `kv`: see `kv_tokens`."""
    first = last
    while first > 0 and kv[END, first] == 0:
        first -= 1
    is_marked[first : last + 1] = True
    return int(kv[END, first])


@compiled
def _working_kv_bytes(num_keys: int, memory_rates: MemoryRates, stage: int) -> float:
    """Bytes of pages and exchange at work with `num_keys` tokens of keys and values, see `MemoryRates`."""
    of_page = 0.0
    if num_keys > 0:
        for kind in range(memory_rates.pages.shape[1]):
            line = memory_rates.pages[stage, kind]
            of_page = max(of_page, line[0] + line[1] * min(num_keys, memory_rates.page_tokens))
    first = min(num_keys, memory_rates.chunk_size)
    following = min(num_keys - first, memory_rates.chunk_size)
    by_pages = memory_rates.exchanged[1] * first + memory_rates.exchanged[2] * following
    return float(of_page + max(memory_rates.exchanged[0], by_pages))


def highest_peak(snapshots: Int64Array, memory_rates: MemoryRates) -> tuple[Int64Array, Int64Array]:
    """The one of `snapshots` int64 [n, pp, 8] (see `peak_snapshots`) that takes most bytes on each stage.

    Returns it, int64 [pp, 8], and which of the n it is, int64 [pp].
    """
    place = snapshot_bytes(snapshots, memory_rates).argmax(axis=0)  # [pp]
    found = snapshots[place, np.arange(place.size)]
    found[:, ATTENTION_ON_HOST] = snapshots[:, :, ATTENTION_ON_HOST].max(axis=0)
    return found, place


@compiled
def snapshot_bytes(snapshots: Int64Array, memory_rates: MemoryRates) -> Float64Array:
    """Bytes of each of `snapshots` int64 [n, pp, 8] on its stage, without those that are always resident: [n, pp]."""
    found = np.empty(snapshots.shape[:2])
    for each in range(snapshots.shape[0]):
        for stage in range(snapshots.shape[1]):
            found[each, stage] = _bytes_of_snapshot(snapshots[each, stage], memory_rates, stage)
    return found


@compiled
def _bytes_of_snapshot(snapshot: Int64Array, memory_rates: MemoryRates, stage: int) -> float:
    """Bytes of `snapshot` [8] on a stage, see `snapshot_bytes`."""
    num_bytes = _working_kv_bytes(snapshot[KV], memory_rates, stage)
    for kind in range(memory_rates.tokens.shape[1]):
        num_bytes += snapshot[kind] * memory_rates.tokens[stage, kind]
    of_one, others = 0.0, snapshot[KV] - snapshot[KV_GRADIENTS]
    for kind in range(memory_rates.gradients.shape[1]):
        gradients = memory_rates.gradients[stage, kind]
        num_bytes += gradients[0] * min(snapshot[KV_GRADIENTS], gradients[2])
        of_one = max(of_one, gradients[1] * min(others, gradients[2]))
    return float(num_bytes + of_one)
