"""Calibrates the planner's cost model on the device at hand: from a model's config to a fitted hardware profile.

Timed is what the device does on its own (products, copies, attention, layers that have next to nothing to do), and
chunks of given sizes and prefixes, run by the executor as a plan would have them. One without a prefix is a whole
sequence, and again eight packed ones. One with a prefix is a part of a long sequence whose earlier parts ran forward
before, and which one more part follows, that runs backward before: as it is amid any long sequence.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from chunkplan.cost.calibrate import Calibration, ChunkTime, DeviceRates, layers_that_fit
from chunkplan.cost.calibrate import calibrate as fit
from chunkplan.cost.hardware import MEASURED_QUERIES, AttentionRates, load_hardware
from chunkplan.cost.model import Precision
from chunkplan.cost.model_config import read_model_config
from chunkplan.errors import UsageError
from chunkplan.planfile.plan import Action, Chunk, Segment
from chunkplan_runtime.attention.kernel import AttentionKernel, Form
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.calibration import CalibrationOptions
from chunkplan_runtime.devices import calibrated_name, device_name, find_device, shipped_profile, synchronize
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.checks import entry_of, kv_shapes
from chunkplan_runtime.models.model import CausalLM, new_model, planned_config
from chunkplan_runtime.training.optimizer import TrainedWeights


@dataclass(frozen=True)
class _Sizes:
    """The sizes measured on a type of device: chunks where options do not say, and the rest, which is large there.

    `queries`: many, and few. `head_sizes`: beside the model's own. `product`: rows and columns.
    """

    precision: Precision
    chunk_sizes: Sequence[int]
    prefixes: Sequence[int]
    most_layers: float
    queries: tuple[int, int]
    head_sizes: tuple[int, ...]
    product: int
    copy_bytes: int


#: Measured in minutes on one GPU with a model of 7B, and on a CPU with a small one.
_SIZES = {
    "cuda": _Sizes(
        precision="bf16",
        chunk_sizes=(1024, 2048, 4096, 8192, 16384, 32768),
        prefixes=(8192, 65536, 262144),
        most_layers=math.inf,
        queries=(MEASURED_QUERIES, 2048),
        head_sizes=(128, 64),
        product=8192,
        copy_bytes=1 << 30,
    ),
    "cpu": _Sizes("fp32", (256, 512, 1024, 2048), (2048, 8192), 2, (256, 64), (), 384, 1 << 26),
}

#: A block has so many times as many keys as many queries.
_KEYS = 4

#: The least part of a time that is counted, so that times of a noisy device make rates.
_LEAST = 0.01

#: Of each time the median of so many is taken, after one that does not count.
_REPEATS = 5

#: Of layers without work: tokens and widths.
_NARROW_TOKENS = 16
_NARROW = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": None}
_NARROW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}

#: Of the memory that is free, what layers are chosen to fill: the estimate knows nothing of gaps.
_SHARE_OF_MEMORY = 0.85

#: Sequences in a packed chunk.
PACKED = 8


@dataclass(frozen=True)
class Probe:
    """A chunk to time: its segments' tokens, of which the first sees `prefix_tokens`, in parts of the same size."""

    segments: tuple[int, ...]
    prefix_tokens: int = 0


class _TimeIsUpError(Exception):
    """Raised when the timed part has run, to leave the rest of the step undone."""


def calibrate(
    options: CalibrationOptions,
    report: Callable[[int, int], None] = lambda done, total: None,
    show: Callable[[ChunkTime], None] = lambda chunk: None,
) -> tuple[Calibration, list[Probe]]:
    """Measure chunks on the device and fit a profile to them: the twin of `chunkplan calibrate`.

    Returns the calibration, whose `hardware` a `CostModel` or `TuneOptions` takes as it is and
    `chunkplan.cost.calibrate.write_profile` keeps, and the chunks that did not fit the memory. `report` and
    `show`: see `measure`.

    Raises:
        UsageError: the device or a file is not there, the model is not one that can be run or predicted, or too few
            chunks could be measured.
        DataError: a file is damaged.
    """
    device = find_device(options.device)
    sizes = _SIZES[device.type]
    precision = options.precision or sizes.precision
    probes = make_probes(
        options.chunk_sizes or sizes.chunk_sizes, sizes.prefixes if options.prefixes is None else options.prefixes
    )
    base_name = options.base or shipped_profile(device_name(device))
    base = load_hardware(base_name or "h100")
    shape = read_model_config(options.model)
    config = planned_config(options.model)
    num_layers = options.layers
    if num_layers is None:
        fitting = layers_that_fit(
            shape,
            base,
            precision,
            memory_bytes=int(_SHARE_OF_MEMORY * memory(device)[0]),
            chunk_size=max(sum(probe.segments) for probe in probes),
            kv_tokens=max(probe.prefix_tokens + 2 * sum(probe.segments) for probe in probes),
        )
        num_layers = int(min(fitting, sizes.most_layers))
    if num_layers > shape.num_layers:
        raise UsageError(
            f"--layers is {num_layers}, {shape.name} has {shape.num_layers}", hint="give no more than it has"
        )
    config = first_layers(config, num_layers)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    try:
        rates = measure_device(device, config, dtype, options.attention)
        kernels = Kernels(options.attention, rates.attention)
        model = new_model(config, dtype, options.seed, device=device, kernels=kernels)
        TrainedWeights(model.model, master_weights=precision == "bf16")  # gradients are added up as in training
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{num_layers} layers do not fit the free memory of {device_name(device)}",
            hint="give fewer --layers, and let nothing else run on the device",
        ) from error
    if base_name is None:  # neither named nor that of a GPU like this one
        base = replace(base, peak_flops=rates.flops if precision == "bf16" else rates.fp32_flops)
    chunks, left_out = measure(model, probes, repeats=options.repeats, seed=options.seed, report=report, show=show)
    calibration = fit(
        chunks,
        rates,
        shape=shape.first(num_layers),
        precision=precision,
        base=base,
        name=calibrated_name(options.name, rates.device),
        seed=options.seed,
    )
    return calibration, left_out


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, and bytes in all: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def measure_device(device: torch.device, config: Any, dtype: torch.dtype, attention: str) -> DeviceRates:
    """Measure it; layers without work are those of `config`, a transformers config, in all but their widths."""
    sizes = _SIZES[device.type]

    def product_flops(dtype: torch.dtype) -> float:
        one, other = (torch.randn(sizes.product, sizes.product, device=device).to(dtype) for _ in range(2))
        return 2 * sizes.product**3 / _seconds(lambda: one @ other, device)

    source, target = (torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy_seconds = host_seconds = _seconds(lambda: target.copy_(source), device)
    if device.type == "cuda":
        there = torch.empty(sizes.copy_bytes, dtype=torch.uint8, pin_memory=True)
        ways = (lambda: there.copy_(source, non_blocking=True), lambda: source.copy_(there, non_blocking=True))
        host_seconds = max(_seconds(way, device) for way in ways)
    narrow = copy.deepcopy(config)
    for name, value in (_NARROW | _NARROW_HEADS).items():
        setattr(narrow, name, value)
    model = new_model(narrow, dtype, seed=0, device=device, kernels=Kernels(attention))
    overheads = [time_probe(model, Probe((_NARROW_TOKENS,)))[0] for _ in range(1 + _REPEATS)]
    rates = DeviceRates(
        device=device_name(device),
        flops=product_flops(torch.bfloat16),
        fp32_flops=product_flops(torch.float32),
        copy_bytes=2 * sizes.copy_bytes / copy_seconds,
        host_bytes=sizes.copy_bytes / host_seconds,
        layer_overhead_ns=median(overheads[1:]) / config.num_hidden_layers,
        memory_bytes=memory(device)[1],
        attention=_measure_attention(device, config, dtype, attention),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _measure_attention(
    device: torch.device, config: Any, dtype: torch.dtype, attention: str
) -> tuple[AttentionRates, ...]:
    """Measure the kernels that layers of `config`, a transformers config, can run with: the fastest first.

    Of each the layers' own heads come first. Nothing of a model without attention.
    """
    (kv_heads, key_dim), (_, value_dim) = kv_shapes(config)
    heads, softcap = (entry_of(config, name) for name in ("num_attention_heads", "attn_logit_softcapping"))
    others = [(size, size) for size in _SIZES[device.type].head_sizes if size != (key_dim + value_dim) // 2]
    found = []
    for dims in [(key_dim, value_dim), *others] if heads else ():
        serving = [*Kernels(attention).serving(device, dtype, dims, Form(1.0, causal=True, softcap=softcap), [])]
        for kernel in serving[:-1] or serving:  # the last one is plain attention, which is for want of others
            found.append(_of_heads(kernel, device, dtype, (heads, kv_heads), dims))
    own = {each.kernel: each.both_blocks for each in reversed(found)}
    return tuple(sorted(found, key=lambda each: own[each.kernel], reverse=True))


def _of_heads(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> AttentionRates:
    many, few = _SIZES[device.type].queries
    num_keys = _KEYS * many

    def times(num_queries: int, num_keys: int, causal: bool) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        form = Form(dims[0] ** -0.5, causal)
        made = ((heads[0], num_queries, dims[0]), (heads[1], num_keys, dims[0]), (heads[1], num_keys, dims[1]))
        query, key, value = (torch.randn(1, *shape, device=device).to(dtype) for shape in made)
        out, lse = kernel.forward(query, key, value, form)
        gradient = torch.randn_like(out)
        forward = _seconds(lambda: kernel.forward(query, key, value, form), device)
        return forward, _seconds(lambda: kernel.backward(gradient, query, key, value, out, lse, form), device)

    blocks, short, squares = times(many, num_keys, False), times(few, num_keys, False), times(many, many, True)
    of_query = max(blocks[0] - short[0], _LEAST * blocks[0]) / (many - few)
    ramp = max(blocks[0] / of_query - many, _LEAST * few)
    flops = 2.0 * heads[0] * (dims[0] + dims[1])  # of a query and a key that it sees, forward
    rates: dict[str, float] = {}
    for name, share, block, square in zip(("forward", "backward"), (1.0, 2.5), blocks, squares, strict=True):
        of_pair = block / num_keys / (many + ramp)
        mask = max(square - of_pair * many * many / 2, 0.0) / many  # of a query, what no block takes
        rates[f"{name}_blocks"] = share * flops / (of_pair * (1 + ramp / MEASURED_QUERIES))
        rates[f"{name}_squares"] = share * flops / (of_pair + mask * 2 / MEASURED_QUERIES)
    return AttentionRates(kernel=kernel.name, head_size=(dims[0] + dims[1]) // 2, ramp_queries=ramp, **rates)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        synchronize(device)
        started = perf_counter_ns()
        run()
        synchronize(device)
        times.append((perf_counter_ns() - started) / 1e9)
    return median(times[1:])


def first_layers(config: Any, num_layers: int) -> Any:
    """The transformers config of a model that has the first layers of `config` only."""
    cut = copy.deepcopy(config)
    cut.num_hidden_layers = num_layers
    if getattr(cut, "layer_types", None):
        cut.layer_types = cut.layer_types[:num_layers]
    return cut


def make_probes(chunk_sizes: Sequence[int], prefixes: Sequence[int]) -> list[Probe]:
    """Make of each size a whole sequence, a packed chunk, and a part behind each prefix, rounded up to whole parts.

    Raises:
        UsageError: there are fewer than three sizes, or one is too small to be packed.
    """
    sizes = sorted(set(chunk_sizes))
    if len(sizes) < 3 or sizes[0] < 2 * PACKED:
        raise UsageError(
            f"--chunk-sizes is {','.join(map(str, sizes))}, expected three or more, from {2 * PACKED}",
            hint="for example 1024,4096,16384: the times of fewer, or of smaller ones, do not tell rates apart",
        )
    probes = []
    for size in sizes:
        packed = tuple(size // PACKED + (place < size % PACKED) for place in range(PACKED))
        whole_parts = sorted({-(-prefix // size) * size for prefix in prefixes} - {0})
        probes += [Probe((size,)), Probe(packed), *(Probe((size,), prefix) for prefix in whole_parts)]
    return probes


def measure(
    model: CausalLM,
    probes: Sequence[Probe],
    *,
    repeats: int,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
    show: Callable[[ChunkTime], None] = lambda chunk: None,
) -> tuple[list[ChunkTime], list[Probe]]:
    """Time `probes` `repeats` times each, in turns, so that a device that slows down does so for all of them.

    Before, those without a prefix run once unmeasured. Returns the times in the order of the probes, and the probes
    that do not fit the memory of a GPU. `report` is called with the runs done and those to do, `show` with each chunk
    as soon as it is measured.
    """
    times: dict[Probe, list[tuple[int, int]]] = {probe: [] for probe in probes}
    chunks: list[ChunkTime] = []
    left_out: list[Probe] = []
    rounds = [(0, probe) for probe in probes if not probe.prefix_tokens]
    rounds += [(number, probe) for number in range(1, repeats + 1) for probe in probes]
    for done, (number, probe) in enumerate(rounds, 1):
        if probe not in left_out:
            try:
                times[probe].append(time_probe(model, probe, seed))
            except torch.OutOfMemoryError:
                left_out.append(probe)
        if probe in left_out:
            torch.cuda.empty_cache()  # now that what the error held on to is let go
        elif number == repeats:
            forward_kv, train = zip(*times[probe][-repeats:], strict=True)
            chunks.append(
                ChunkTime(
                    segments=probe.segments,
                    prefix_tokens=probe.prefix_tokens,
                    forward_kv_ns=float(median(forward_kv)),
                    train_ns=float(median(train)),
                    spread=median(abs(each - median(train)) for each in train) / median(train),
                )
            )
            show(chunks[-1])
        report(done, len(rounds))
    return chunks, left_out


def time_probe(model: CausalLM, probe: Probe, seed: int = 0) -> tuple[int, int]:
    """Time a probe: nanoseconds of its `forward_kv`, and of its `recompute` and `backward` together."""
    work, chunk_id = _work(probe, model.vocab_size, seed)
    times: dict[str, int] = {}

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        if action.chunk_id != chunk_id:
            yield
            return
        synchronize(model.device)
        started = perf_counter_ns()
        yield
        synchronize(model.device)
        times[action.op] = perf_counter_ns() - started
        if action.op == "backward":
            raise _TimeIsUpError

    with suppress(_TimeIsUpError):
        RankExecutor(model).run(work, sum(probe.segments), around)
    return times["forward_kv"], times["recompute"] + times["backward"]


def _work(probe: Probe, vocab_size: int, seed: int) -> tuple[RankWork, int]:
    """The chunks that a probe needs and their actions, and which chunk it is; tokens are random, all are targets."""
    size = sum(probe.segments)
    timed = probe.prefix_tokens // size
    packed = enumerate(zip(probe.segments, accumulate(probe.segments[:-1], initial=0), strict=True))
    spans_of = [tuple(Span(place, 0, tokens, tokens, start) for place, (tokens, start) in packed)]
    if timed:
        length = (timed + 2) * size
        spans_of = [(Span(0, start, start + size, length, 0, group_id=0),) for start in range(0, length, size)]
    random = torch.Generator().manual_seed(seed)
    chunks, tensors = {}, {}
    for part, spans in enumerate(spans_of):
        chunks[part] = Chunk(
            chunk_id=part,
            group_id=spans[0].group_id,
            group_index=part,
            group_size=len(spans_of),
            num_tokens=size,
            num_target_tokens=size,
            prefix_tokens=spans[0].start,
            keeps_activations=False,
            cost=0.0,
            segments=tuple(Segment(span.sequence_id, span.start, span.stop) for span in spans),
        )
        tensors[part] = ChunkTensors(
            input_ids=torch.randint(vocab_size, (1, size), generator=random),
            position_ids=torch.cat([torch.arange(span.start, span.stop) for span in spans])[None],
            labels=torch.randint(vocab_size, (size,), generator=random),
            spans=spans,
        )
    actions = [Action("forward_kv", part, 0) for part in chunks]
    for part in reversed(range(timed, len(chunks))):
        actions += [Action("recompute", part, 0), Action("backward", part, 0)]
    return RankWork(step=0, dp_rank=0, actions=actions, chunks=chunks, tensors=tensors), timed
