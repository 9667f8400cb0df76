"""Trees of sequences as the rest of the planner sees them: each is one item, of the tokens that it runs.

A token of a tree has its place in the order in which the tree's tokens are run. An item that does not fit a chunk is
cut where its branches say, not every so many tokens; once there are chunks, places become tokens of sequences again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import Float64Array, attention_pairs_of, whole_pairs, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.planfile.chunks import Chunks
from chunkplan.planfile.schema import PREFIXES, to_arrow
from chunkplan.planning.branches import Branches, cut_tree, kept_chunks
from chunkplan.planning.ranks import Sequences
from chunkplan.planning.splitting import TargetMask, k_for_length, times_of_parts
from chunkplan.planning.trees import TokensOf, Tree, find_trees, trees_alone


@dataclass(frozen=True)
class TreeItem:
    """A tree as an item: its runs, and of its parts whether their chunks keep activations, bool [num_parts].

    `pairs`: its attention pairs; `work`: the time of its parts, in ns; `target` bool [tokens + 1]: whether the token
    that follows the one at a place counts in the loss stands one further.
    """

    tree: Tree
    branches: Branches
    keeps: BoolArray
    pairs: float
    work: int
    target: BoolArray


@dataclass(frozen=True)
class Forest:
    """The items of some steps, those of a step descending by tokens; [num_items] each.

    `step_starts` int64 [num_steps + 1]; `ids` int32: the sequence, or -1 - t for `trees[t]`; `tokens` int64;
    `pairs` float64: of attention. `bound_ns` int64 [num_steps]: no way to cut trees gives ranks less to do.
    """

    step_starts: Int64Array
    ids: Int32Array
    tokens: Int64Array
    pairs: Float64Array
    trees: list[TreeItem]
    bound_ns: Int64Array

    def cut(self, sequences: Sequences, chunk_size: int) -> Sequences:
        """`sequences`, which are the items cut as if each were one sequence, with the parts of trees in their place."""
        places = np.flatnonzero((self.ids < 0) & (self.tokens > chunk_size))
        if not places.size:
            return sequences
        found = [self.trees[-1 - each] for each in self.ids[places]]
        before = np.diff(sequences.parts)
        after = before.copy()
        after[places] = [each.keeps.size for each in found]
        is_tree = np.isin(np.arange(after.size), places)
        is_own, was_own = np.repeat(~is_tree, after), np.repeat(~is_tree, before)
        part_tokens, part_keeps = np.empty(is_own.size, np.int64), np.empty(is_own.size, np.bool_)
        part_tokens[is_own], part_keeps[is_own] = sequences.part_tokens[was_own], sequences.part_keeps[was_own]
        part_tokens[~is_own] = np.concatenate([each.branches.tokens for each in found])
        part_keeps[~is_own] = np.concatenate([each.keeps for each in found])
        work = sequences.work.copy()
        work[places] = [each.work for each in found]
        return sequences._replace(work=work, parts=offsets_of(after), part_tokens=part_tokens, part_keeps=part_keeps)

    def targets(self, num_target_tokens: Int32Array) -> Int32Array:
        """The target tokens of each item, int32 [num_items]; `num_target_tokens`: those of every sequence."""
        found = num_target_tokens[np.maximum(self.ids, 0)]
        is_tree = self.ids < 0
        found[is_tree] = [int(self.trees[-1 - each].target.sum()) for each in self.ids[is_tree]]
        return found

    def mask_of(self, mask: TargetMask | None) -> TargetMask:
        """The target masks of items, by their id; `mask`: of sequences."""

        def of_item(item: int) -> BoolArray:
            if item < 0:
                return self.trees[-1 - item].target
            assert mask is not None, "sequences with tokens have masks"
            return mask(item)

        return of_item

    def spread(self, chunks: Chunks) -> Chunks:
        """`chunks`, whose segments are of places in items, with those of tokens of sequences."""
        counts = np.ones(chunks.sequence_id.size, np.int64)
        rows = np.flatnonzero(chunks.sequence_id < 0)
        chunk_of = np.repeat(np.arange(chunks.num_tokens.size), np.diff(chunks.segments))
        runs = []
        for row in rows.tolist():
            item = self.trees[-1 - int(chunks.sequence_id[row])]
            stops = np.cumsum(item.branches.tokens)
            part = int(np.searchsorted(stops, chunks.end[row]))
            first = item.branches.run_stops[part - 1] if chunks.start[row] else 0
            own = slice(first, item.branches.run_stops[part])
            runs.append((item.tree.ids[item.branches.sequence[own]], item.branches.start[own], item.branches.stop[own]))
            counts[row] = runs[-1][0].size
            if stops.size > 1:
                chunks.last_dependent[chunk_of[row]] = item.branches.last_dependent[part]
        is_run = np.repeat(chunks.sequence_id < 0, counts)
        columns = {}
        for name, *values in zip(("sequence_id", "start", "end"), *runs, strict=True):
            columns[name] = np.repeat(getattr(chunks, name), counts)
            columns[name][is_run] = np.concatenate([np.empty(0, np.int64), *values])
        return chunks._replace(segments=offsets_of(sum_runs(counts, chunks.segments)), **columns)

    def prefixes_table(self, first_step: int) -> pa.Table:
        """The rows of `prefixes`; `first_step`: the number of the first step."""
        step = np.repeat(np.arange(self.step_starts.size - 1), np.diff(self.step_starts))
        columns: list[list[Int64Array]] = [[np.empty(0, np.int64)] for _ in PREFIXES]
        for place in np.flatnonzero(self.ids < 0).tolist():
            tree = self.trees[-1 - int(self.ids[place])].tree
            inner = tree.parent >= 0
            rows = np.full(int(inner.sum()), first_step + step[place])
            for column, values in zip(
                columns, (rows, tree.ids[inner], tree.ids[tree.parent[inner]], tree.begin[inner]), strict=True
            ):
                column.append(values)
        found = [np.concatenate(column) for column in columns]
        order = np.lexsort((found[1], found[0]))
        arrays = [
            to_arrow(values[order].astype(field.type.to_pandas_dtype()))
            for values, field in zip(found, PREFIXES, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=PREFIXES)


def grow_forest(
    step_starts: Int64Array,
    ids: Int32Array,
    tokens: Int64Array,
    tokens_of: TokensOf,
    config: PlanConfig,
    cost: CostModel,
    shares: BoolArray | None = None,
) -> Forest:
    """The forest of the sequences of some steps: `ids`, `tokens` [num_sequences]; `step_starts` [num_steps + 1].

    `shares` bool [num_steps]: the steps in which sequences share anything; left out, all.
    """
    trees: list[TreeItem] = []
    all_ids, all_tokens, all_pairs, starts, bounds = [], [], [], [0], []
    for step, (first, last) in enumerate(pairwise(step_starts.tolist())):
        own = ids[first:last].astype(np.int64), tokens[first:last]
        is_shared = shares is None or shares[step]
        found = find_trees(*own, tokens_of, config.dp, cost) if is_shared else trees_alone(*own)
        alone = np.array([each.ids[0] for each in found if each.ids.size == 1], np.int64)
        lengths = np.array([each.lengths[0] for each in found if each.ids.size == 1], np.int64)
        grown = [item_of(each, tokens_of, config, cost) for each in found if each.ids.size > 1]
        of_step = np.concatenate([alone, -1 - len(trees) - np.arange(len(grown))])
        num_tokens = np.concatenate([lengths, [int(each.branches.tokens.sum()) for each in grown]]).astype(np.int64)
        pairs = np.concatenate([whole_pairs(cost, lengths), [each.pairs for each in grown]])
        places = {each: place for place, each in enumerate(ids[first:last].tolist())}
        heads = [*alone.tolist(), *(int(each.tree.ids[0]) for each in grown)]
        order = np.lexsort((np.array([places[each] for each in heads]), -num_tokens))
        all_ids.append(of_step[order])
        all_tokens.append(num_tokens[order])
        all_pairs.append(pairs[order])
        starts.append(starts[-1] + order.size)
        trees += grown
        bounds.append(_bound_ns(found, tokens[first:last], config, cost))
    return Forest(
        np.array(starts),
        np.concatenate(all_ids).astype(np.int32),
        np.concatenate(all_tokens),
        np.concatenate(all_pairs),
        trees,
        np.array(bounds, np.int64),
    )


def item_of(tree: Tree, tokens_of: TokensOf, config: PlanConfig, cost: CostModel) -> TreeItem:
    """The item of a tree of several sequences."""
    k = int(k_for_length((tree.lengths - tree.begin).sum()[None], config.k, config.k_by_length)[0])

    def timed(branches: Branches) -> tuple[BoolArray, Float64Array, int]:
        """Choose parts that keep activations: these, the attention pairs of each run, and the time of all parts."""
        pairs = attention_pairs_of(branches.stop - branches.start, branches.start, cost.shape.attention_patterns)
        of_parts = sum_runs(pairs.astype(np.int64), np.append(0, branches.run_stops)).astype(np.float64)
        part_ns, again_ns = times_of_parts(branches.tokens, of_parts, config, cost)
        keeps = kept_chunks(branches.last_dependent, again_ns, k)
        return keeps, pairs, int(part_ns.sum() + again_ns[~keeps].sum())

    branches = cut_tree(tree, config.chunk_size, lambda way: timed(way)[2])
    keeps, pairs, work = timed(branches)
    target = [np.zeros(1, np.bool_)]
    for sequence, start, stop in zip(*(values.tolist() for values in branches[:3]), strict=True):
        own = tokens_of(int(tree.ids[sequence]))[1][start + 1 : stop + 1]
        target.append(np.append(own, np.zeros(stop - start - own.size, np.bool_)))
    return TreeItem(tree, branches, keeps, float(pairs.sum()), work, np.concatenate(target))


def _bound_ns(found: list[Tree], tokens: Int64Array, config: PlanConfig, cost: CostModel) -> int:
    """The least that the rank with most to do has in a step: its share of all tokens that are run, or one sequence."""
    begin, lengths = np.concatenate([each.begin for each in found]), np.concatenate([each.lengths for each in found])
    own = lengths - begin
    of_own = work_ns(cost, own, attention_pairs_of(own, begin, cost.shape.attention_patterns))
    num_chunks = -(-int(own.sum()) // config.chunk_size)
    share = (int(of_own.sum()) + num_chunks * cost.chunk_ns) // config.dp
    return max(share, int(work_ns(cost, tokens, whole_pairs(cost, tokens)).max()) + cost.chunk_ns)
