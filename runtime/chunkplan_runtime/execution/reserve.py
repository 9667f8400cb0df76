"""Takes the host memory of a step before it begins, of pages and of inputs of layers.

It takes long, and a GPU has nothing to do meanwhile. While links are open none may be taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from chunkplan.operations import BACKWARDS
from chunkplan.planfile.plan import Action
from chunkplan_runtime.attention.kept import Shapes, page_shapes
from chunkplan_runtime.feed.stream import RankWork
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.page_needs import PageNeeds, page_needs
from chunkplan_runtime.models.checks import kv_shapes, windows
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.recurrent import keeps_kv
from chunkplan_runtime.sharing import SharedPart, Span


def reserve_pages(
    memory: HostMemory, parts: Sequence[CausalLM], work: RankWork, page_tokens: int, *, with_gradients: bool
) -> None:
    """Take the memory of all pages of all virtual stages, `parts`, each of which has pages of its own."""
    needs: defaultdict[Shapes, PageNeeds] = defaultdict(PageNeeds)
    for virtual_stage, part in enumerate(parts):
        actions = [action for action in work.actions if action.virtual_stage == virtual_stage]
        own = RankWork(work.step, work.dp_rank, actions, work.chunks, work.tensors)
        for shapes, found in _needs_of(part, own, page_tokens, with_gradients=with_gradients):
            needs[shapes].add(found)
    for shapes, found in needs.items():
        memory.reserve(found, shapes, parts[0].dtype)


def reserve_inputs(parts: Sequence[CausalLM], work: RankWork) -> None:
    """Take the host memory of the layers' inputs of as many chunks as are in flight at once on all virtual stages.

    All get as much as the largest chunk takes where there are most layers.
    """
    if not parts[0].current.offloaded:
        return
    num_tokens = max((tensors.input_ids.numel() for tensors in work.tensors.values()), default=0)
    most = most_at_once(work.actions, ("forward", "recompute"), BACKWARDS)
    num_bytes = max(part.offloaded_bytes(num_tokens) for part in parts)
    if num_bytes:
        parts[0].current.host_inputs.reserve(most, num_bytes, parts[0].device)


def most_at_once(actions: Sequence[Action], begin: Sequence[str], end: Sequence[str]) -> int:
    """How many chunks there are at most between ops that begin with them and ops that end with them."""
    return max(accumulate((action.op in begin) - (action.op in end) for action in actions), default=0)


def _needs_of(
    model: CausalLM, work: RankWork, page_tokens: int, *, with_gradients: bool
) -> Iterator[tuple[Shapes, PageNeeds]]:
    """What a virtual stage needs of pages of some shapes, for parts of which as many processes share heads at once."""
    of_all, attends = windows(model.config), keeps_kv(model.config)
    parts: dict[int, dict[int, list[tuple[Span, SharedPart | None]]]] = {}
    for chunk_id, tensors in work.tensors.items():
        num_sharing = 1 if tensors.shared is None else len(tensors.shared.heads)
        parts.setdefault(num_sharing, {})[chunk_id] = [(part, tensors.shared) for part in tensors.parts]
    for num_sharing, by_chunk in parts.items():
        own: dict[tuple[Shapes, bool], list[int | None]] = {}  # windows, by what pages keep of a layer
        for index, layer in model.own_layers.items():
            if attends[index]:
                for each in page_shapes(layer, kv_shapes(model.config, index), num_sharing):
                    own.setdefault(each, []).append(of_all[index])
        for (shapes, by_parts), its_windows in own.items():
            tokens = 1 if by_parts else page_tokens
            yield shapes, page_needs(work.actions, by_chunk, tokens, its_windows, with_gradients=with_gradients)
