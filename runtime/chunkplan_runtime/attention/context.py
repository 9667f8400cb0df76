"""Per-chunk state of attention: the segments of a chunk, and results of a forward kept for the chunk's recompute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import _pop_mode_temporarily

from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.kv.host_memory import HostTensor, HostTensors
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Run, SharedPart, Span
from chunkplan_runtime.trees import TreePart

if TYPE_CHECKING:
    from chunkplan_runtime.attention.latents import ExpandedLatents

#: What a forward is in, where checkpoints hold other results than elsewhere: a module that mixes tokens, or what is run
#: again whatever is held.
MIXER, RUN_AGAIN = "mixer", "run again"

#: From sink, and query, key, value and latents, to out and log-sum-exp.
Attend = Callable[[Tensor | None, Sequence[Tensor]], tuple[Tensor, Tensor]]


class KeptResults:
    """Out and log-sum-exp of each attention of a chunk, in the order of its layers; on the device, or in host memory.

    They are of its forward for keys and values alone, and stand in for attention in its recompute, which holds them as
    it would hold what attention gives. A layer's are no longer `held` as the recompute's layer takes them. If attention
    `is_hidden`, the innermost mode of torch that looks at operators sees none of its own: it would miss them later.
    """

    def __init__(self, host: HostTensors, *, is_hidden: bool = False) -> None:
        self._host, self._is_hidden = host, is_hidden
        self.held: deque[HostTensor] = deque()
        self._is_taken = False

    def take(self) -> None:
        """Hand them out from now on; those of the first layer are on their way."""
        self._is_taken = True
        for each in islice(self.held, 2):
            each.start_fetch()

    def attend(self, attend: Attend, *given: Any) -> tuple[Tensor, Tensor]:
        """Run `attend` and keep the results, or return kept ones. A layer that its backward runs again attends anew."""
        if self.held and self._is_taken:
            return self._next(), self._next()
        is_hidden = self._is_hidden and not self._is_taken
        with _pop_mode_temporarily() if is_hidden else nullcontext():
            out, lse = attend(*given)
        if not self._is_taken:
            # Not `out` itself, which gets a graph that would have what is kept.
            self.held += self._host.sent(out.detach()), self._host.sent(lse)
        return out, lse

    def _next(self) -> Tensor:
        first = self.held.popleft()
        return self._host.fetched(first, *islice(self.held, 2))


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a chunk: a part, or whole sequences with `borders` from 0 on, or a whole tree.

    `runs`: which tokens of the sequence a part's are here, [start, stop) each and one after another; those of all of it
    unless its pages are shared. `tree`: the part of a tree that they are, or all of one.
    """

    start: int
    stop: int
    part: Span | None = None
    runs: tuple[Run, ...] = ()
    borders: tuple[int, ...] | None = None
    tree: TreePart | None = None


@dataclass
class CurrentChunk:
    """State of the chunk that a model runs, forward or backward: every module of the model has this as `chunkplan`.

    A later stage starts with `inputs` [1, num_tokens, hidden_size] from the previous one, and leaves its result for the
    next one in `output`. If layers keep states, `cache` has those of the segment, and `borders` those at the ends of
    all segments of the chunk. `router_loss`: the router loss of this run. `expanded`: expanded latents of the current
    layer. `marks`: of the current module of the layer. `host_inputs`: inputs of layers in host memory, those with the
    indices `offloaded`. `kept`: outputs of attention for the chunk's recompute; `attended`: that of the current layer,
    for when it runs again. `compiles`: true if the model is compiled. `temperature`: what logits are divided by.
    """

    context: ChunkContext | None = None
    inputs: Tensor | None = None
    output: Tensor | None = None
    borders: tuple[Any, ...] = ()
    cache: Any = None
    router_loss: Any = None
    expanded: ExpandedLatents | None = None
    marks: tuple[str, ...] = ()
    kept: KeptResults | None = None
    attended: KeptResults | None = None
    host_inputs: HostTensors = field(default_factory=HostTensors)
    offloaded: frozenset[int] = frozenset()
    compiles: bool = False
    temperature: float = 1.0

    @contextmanager
    def within(self, mark: str) -> Iterator[None]:
        """Within the block what is at work has one more mark."""
        before = self.marks
        self.marks = (*before, mark)
        try:
            yield
        finally:
            self.marks = before


@dataclass(frozen=True)
class ChunkContext:
    """The metadata that attention needs of a chunk beside its tensors. The spans lie side by side and cover the chunk.

    `seed`: of its dropout. Where other processes have slices of it too, `shared` is the whole, and attention takes
    that: all tokens that those have together who share heads.
    """

    spans: Sequence[Span]
    store: KVStore
    kernels: Kernels
    causal: bool = True
    seed: int | None = None
    shared: SharedPart | None = None

    @cached_property
    def has_parts(self) -> bool:
        """True if the chunk has a part of a split sequence."""
        return any(tokens.part is not None for tokens in self.ranges)

    @cached_property
    def ranges(self) -> list[TokenRange]:
        """The chunk as the attention takes it: every part by itself, whole sequences side by side in one range."""
        if self.shared is not None:
            num_tokens = sum(stop - start for start, stop in self.shared.runs)
            if self.shared.is_paged or self.shared.span.is_split:
                return [TokenRange(0, num_tokens, part=self.shared.span, runs=self.shared.runs)]
            return [TokenRange(0, num_tokens, borders=(0, num_tokens))]
        ranges: list[TokenRange] = []
        for is_alone, group in groupby(self.spans, key=lambda span: span.is_split or span.tree is not None):
            spans = [*group]
            if is_alone:
                for span in spans:
                    part, runs = (span, ((span.start, span.stop),)) if span.is_split else (None, ())
                    ranges.append(TokenRange(span.chunk_start, span.chunk_stop, part, runs, tree=span.tree))
            else:
                start = spans[0].chunk_start
                borders = (0, *(span.chunk_stop - start for span in spans))
                ranges.append(TokenRange(start, spans[-1].chunk_stop, borders=borders))
        return ranges
