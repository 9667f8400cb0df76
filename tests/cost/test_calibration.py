"""Calibration: the fit finds the hardware that times were made from, and chunks are timed as a plan would run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chunkplan.cost.calibrate import (
    FITTED,
    MEASURED,
    Calibration,
    ChunkTime,
    DeviceRates,
    calibrate,
    layers_that_fit,
    predicted_ns,
    profile_text,
    refuse_other_profile,
    write_profile,
)
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel, Precision
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.errors import UsageError
from chunkplan_runtime.calibration import calibrate as timing
from chunkplan_runtime.calibration.calibrate import (
    PACKED,
    Probe,
    first_layers,
    make_probes,
    measure,
    measure_device,
    time_probe,
)
from chunkplan_runtime.devices import find_device
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import CausalLM, new_model, read_config

SHAPE = QWEN2_5_7B.first(8)
BASE = load_hardware("h100")
#: Unlike the base in everything that can be measured.
TRUE = replace(
    load_hardware("h200"),
    flops=740e12,
    fp32_flops=60e12,
    copy_bytes=3.9e12,
    ramp_tokens=330,
    kernel_ns=9000,
    launch_ns=60_000,
    attention=tuple(
        replace(each, forward_blocks=1.1 * each.forward_blocks, backward_squares=0.9 * each.backward_squares)
        for each in BASE.attention
    ),
)
PRECISIONS: Sequence[Precision] = ("bf16", "fp32")

#: Entries that are fitted as they are; `attention_flops` says what those of attention do together.
PLAIN_ENTRIES = ("flops", "fp32_flops", "copy_bytes", "ramp_tokens", "kernel_ns", "launch_ns")


def synthetic(precision: Precision, noise: float, seed: int = 0) -> list[ChunkTime]:
    """Times on `TRUE`, as the cost model has them but for noise."""
    random = np.random.default_rng(seed)
    probes = make_probes((256, 1024, 2048, 4096, 8192, 16384, 32768), (8192, 65536, 262144))
    chunks = [
        ChunkTime(segments=probe.segments, prefix_tokens=probe.prefix_tokens, forward_kv_ns=1, train_ns=1, spread=0.01)
        for probe in probes
    ]
    times = predicted_ns(CostModel(shape=SHAPE, hardware=TRUE, precision=precision), chunks)
    times = times * (1 + noise * random.standard_normal(times.shape))
    return [
        replace(chunk, forward_kv_ns=float(forward), train_ns=float(train))
        for chunk, (forward, train) in zip(chunks, times, strict=True)
    ]


def fitted(precision: Precision, chunks: Sequence[ChunkTime], seed: int = 0, off: float = 1.0) -> Calibration:
    """What is fitted where the device does alone, and the base says, `off` times what is true."""
    slower = TRUE.fp32_flops / TRUE.flops if precision == "fp32" else 1.0
    rates = DeviceRates(
        device="a GPU",
        flops=off * TRUE.flops,
        fp32_flops=off * TRUE.fp32_flops,
        copy_bytes=off * TRUE.copy_bytes,
        host_bytes=5e10,
        layer_overhead_ns=38 * off * TRUE.launch_ns,
        memory_bytes=10**11,
        attention=tuple(
            replace(each, **{name: off * slower * getattr(each, name) for name in RATES}) for each in TRUE.attention
        ),
    )
    base = replace(BASE, ramp_tokens=off * TRUE.ramp_tokens, kernel_ns=off * TRUE.kernel_ns)
    return calibrate(chunks, rates, shape=SHAPE, precision=precision, base=base, name="here", seed=seed)


RATES = ("forward_blocks", "forward_squares", "backward_blocks", "backward_squares")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_hardware_that_times_were_made_from_is_found_again(precision: Precision) -> None:
    """All that is fitted, to rounding; what one device cannot tell is the base's; held-out chunks are met."""
    found = fitted(precision, synthetic(precision, 0.0))
    for name in PLAIN_ENTRIES:
        assert getattr(found.hardware, name) == pytest.approx(getattr(TRUE, name), rel=1e-5), name
    for here, true in zip(found.hardware.attention, TRUE.attention, strict=True):
        for name in (*RATES, "ramp_queries"):
            assert getattr(here, name) == pytest.approx(getattr(true, name), rel=1e-5), name
        assert (here.kernel, here.head_size) == (true.kernel, true.head_size)
    assert found.hardware.attention_flops == pytest.approx(TRUE.attention[0].both_blocks, rel=1e-5)
    assert (found.hardware.host_bytes, found.hardware.memory_bytes) == (5e10, 10**11)
    ours = {"name", "attention", "attention_flops", *PLAIN_ENTRIES, *MEASURED}
    others = {name: getattr(BASE, name) for name in vars(BASE) if name not in ours}
    assert {name: getattr(found.hardware, name) for name in others} == others
    assert found.held_out_errors.max() < 1e-6
    assert found.unidentifiable == ()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("seed", range(3))
def test_with_noise_of_three_percent_rates_come_out_within_a_few_percent(precision: Precision, seed: int) -> None:
    """Although the device alone is a tenth faster than within chunks, as they are in fact."""
    found = fitted(precision, synthetic(precision, 0.03, seed), seed, off=1.1)
    true = CostModel(shape=SHAPE, hardware=TRUE, precision=precision).rates
    assert found.cost.rates.token == pytest.approx(true.token, rel=0.05)
    assert found.cost.rates.pair == pytest.approx(true.pair, rel=0.05)
    assert found.cost.rates.backward.pair == pytest.approx(true.backward.pair, rel=0.05)
    if precision == "bf16":  # in float32 the GPU hides all of it
        assert found.cost.rates.launch == pytest.approx(true.launch, rel=0.05)
    assert 0.005 < np.median(found.held_out_errors) < 0.04
    assert found.held_out_errors.max() < 0.1


def test_the_fit_does_not_see_what_is_held_out() -> None:
    """Other times of the held-out third leave the profile as it is; other seeds hold out others."""
    chunks = synthetic("bf16", 0.02)
    found = fitted("bf16", chunks)
    assert found.held_out.sum() == -(-len(chunks) // 3)
    changed = [
        replace(chunk, train_ns=2 * chunk.train_ns) if out else chunk
        for chunk, out in zip(chunks, found.held_out, strict=True)
    ]
    again = fitted("bf16", changed)
    assert again.hardware == found.hardware
    assert again.held_out_errors.max() > 0.4
    assert (fitted("bf16", chunks, seed=1).held_out != found.held_out).any()


def test_what_takes_no_time_stays_at_a_bound_and_is_named() -> None:
    """Times without anything but tokens: ramps, kernels and launches are not said to be infinitely fast."""
    chunks = [
        replace(chunk, forward_kv_ns=1e3 * chunk.num_tokens, train_ns=3e3 * chunk.num_tokens)
        for chunk in synthetic("bf16", 0.0)
    ]
    found = fitted("bf16", chunks)
    assert {"forward_blocks", "backward_blocks", "attention_flops"} <= {*found.unidentifiable}
    assert found.hardware.attention[0].forward_blocks == pytest.approx(10 * TRUE.attention[0].forward_blocks)
    assert "# at its bound" in profile_text(found, torch_version="2", on=date(2026, 1, 1))


def test_too_few_chunks_are_refused() -> None:
    with pytest.raises(UsageError, match="5 chunks were measured, too few"):
        fitted("bf16", synthetic("bf16", 0.0)[:5])


def test_a_written_profile_is_read_again_and_says_where_its_numbers_are_from(tmp_path: Path) -> None:
    found = fitted("bf16", synthetic("bf16", 0.02))
    path = tmp_path / "here.toml"
    write_profile(found, path, torch_version="2.13")
    read = load_hardware(path)
    for name in PLAIN_ENTRIES:
        assert getattr(read, name) == pytest.approx(getattr(found.hardware, name), rel=1e-5)
    for here, written in zip(read.attention, found.hardware.attention, strict=True):
        assert vars(here) == {
            name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for name, value in vars(written).items()
        }
    text = path.read_text()
    assert text.startswith("# Measured by chunkplan calibrate")
    assert "on a GPU, torch 2.13, 20" in text
    ours = {"name", *FITTED, *MEASURED}
    for name in BASE.to_dict().keys() - {"attention"}:
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} = ")]
        assert ("that of h100" in line) == (name not in ours)
    assert text.count("[[attention]]") == 2 and text.count("of the device, and scaled as blocks are") == 4
    write_profile(found, path, torch_version="2.14")  # an earlier calibration is replaced
    assert "torch 2.14" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.toml"]


def test_files_that_no_calibration_wrote_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("name = 'mine'\n")
    for name in ("mine.toml", "none/here.toml", "here.json"):
        with pytest.raises(UsageError):
            refuse_other_profile(tmp_path / name)
    assert (tmp_path / "mine.toml").read_text() == "name = 'mine'\n"


def test_as_many_layers_are_measured_as_fit() -> None:
    """More memory, more layers; never none, never more than there are."""
    layers = [
        layers_that_fit(QWEN2_5_7B, BASE, "bf16", memory_bytes=gib * 2**30, chunk_size=32768, kv_tokens=300_000)
        for gib in (1, 60, 120, 1000)
    ]
    assert layers[0] == 1
    assert 1 < layers[1] < layers[2] < layers[3] == 28


# ---- measuring


@pytest.fixture
def model(tiny_config: Callable[..., dict[str, Any]], tmp_path: Path) -> CausalLM:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("qwen2")))
    return new_model(read_config(path), torch.float32, seed=0)


def test_probes_are_whole_and_packed_chunks_and_parts_behind_whole_parts() -> None:
    probes = make_probes((64, 16, 30, 16), (0, 16, 100))
    assert probes[:4] == [Probe((16,)), Probe((2,) * PACKED), Probe((16,), 16), Probe((16,), 112)]
    assert [probe.prefix_tokens for probe in probes if sum(probe.segments) == 30] == [0, 0, 30, 120]
    assert [probe.prefix_tokens for probe in probes if sum(probe.segments) == 64] == [0, 0, 64, 128]
    assert all(sum(probe.segments) in (16, 30, 64) for probe in probes)
    for sizes in ((16, 32), (8, 16, 32)):
        with pytest.raises(UsageError, match=r"--chunk-sizes is .*, expected three or more, from 16"):
            make_probes(sizes, ())


def test_every_probe_has_a_time(model: CausalLM) -> None:
    probes = make_probes((16, 24, 32), (48,))
    reports: list[tuple[int, int]] = []
    chunks, left_out = measure(model, probes, repeats=2, report=lambda done, total: reports.append((done, total)))
    assert [Probe(chunk.segments, chunk.prefix_tokens) for chunk in chunks] == probes
    assert all(chunk.forward_kv_ns > 0 and chunk.train_ns > 0 and chunk.spread >= 0 for chunk in chunks)
    assert left_out == []
    assert reports == [(done, 6 + 2 * 9) for done in range(1, 6 + 2 * 9 + 1)]


def test_a_probe_runs_what_a_plan_would(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier parts forward, one more part backward before; the timed part runs last, and no more than that."""
    run: list[tuple[str, int, int]] = []

    class Watched(RankExecutor):
        def run(self, work: Any, num_target_tokens: int, around: Any) -> Any:
            def watched(action: Any) -> Any:
                run.append(
                    (
                        action.op,
                        *(getattr(work.chunks[action.chunk_id], name) for name in ("prefix_tokens", "num_tokens")),
                    )
                )
                return around(action)

            return super().run(work, num_target_tokens, watched)

    monkeypatch.setattr(timing, "RankExecutor", Watched)
    time_probe(model, Probe((16,), 32))
    assert run == [
        *[("forward_kv", prefix, 16) for prefix in (0, 16, 32, 48)],
        *[(op, 48, 16) for op in ("recompute", "backward")],
        *[(op, 32, 16) for op in ("recompute", "backward")],
    ]
    run.clear()
    time_probe(model, Probe((2,) * PACKED))
    assert run == [(op, 0, 16) for op in ("forward_kv", "recompute", "backward")]


def test_a_probe_that_does_not_fit_is_left_out(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs out of memory, and whenever: the others are measured."""
    original = timing.time_probe

    def run_out(model: CausalLM, probe: Probe, seed: int) -> tuple[int, int]:
        if probe.prefix_tokens or sum(probe.segments) > 24:
            raise torch.OutOfMemoryError("no")
        return original(model, probe, seed)

    monkeypatch.setattr(timing, "time_probe", run_out)
    chunks, left_out = measure(model, make_probes((16, 24, 32), (48,)), repeats=1)
    assert {chunk.num_tokens for chunk in chunks} == {16, 24}
    assert [(sum(probe.segments), probe.prefix_tokens) for probe in left_out] == [
        (32, 0),
        (32, 0),
        (16, 48),
        (24, 48),
        (32, 64),
    ]


def test_the_device_tells_what_it_does_on_its_own(model: CausalLM) -> None:
    rates = measure_device(find_device("cpu"), model.config, torch.float32, "auto")
    own = {name: value for name, value in vars(rates).items() if name not in ("device", "attention")}
    assert all(value > 0 for value in own.values())
    assert "CPU" in rates.device
    [attention] = rates.attention
    assert (attention.kernel, attention.head_size) == ("torch-cpu", model.config.head_dim)
    assert all(getattr(attention, name) > 0 for name in (*RATES, "ramp_queries"))


def test_a_device_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--device is cuda:99"):
        find_device("cuda:99")


def test_first_layers_leave_the_config_as_it_was(model: CausalLM) -> None:
    cut = first_layers(model.config, 1)
    assert (cut.num_hidden_layers, model.config.num_hidden_layers) == (1, 2)
    assert len(new_model(cut, torch.float32, seed=0).model.model.layers) == 1
