"""A run is compared with a plan's times where they are of its model on its devices, and else says why it is not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chunkplan import CostModel, PlanConfig, build, load_hardware, load_plan
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan_runtime.devices import calibrated_name, device_name, is_profile_of, shipped_profile
from chunkplan_runtime.train import main
from tests.support.training_checks import cost_of_a_run, lines, options

SCRIPTS = Path(sys.executable).parent
HERE = device_name(torch.device("cpu"))


def build_with(made, cost, output):
    build(made / "analysis", output, PlanConfig(chunk_size=8, k=2, global_batch=3), cost=cost)


def test_a_plan_for_this_model_and_device_is_compared_with(made, tmp_path, capsys):
    """Of data-parallel ranks that this process runs one after another, the sum."""
    assert main(options(made, tmp_path, plan="dp")) == 0
    said = capsys.readouterr().err
    assert f"profile   here ({HERE}), 989 TFLOP/s: MFU is a share of this\n" in said and "predicts" not in said
    assert re.search(r"step 0 \(1/12\) .* plan \d+\.\d\d s  MFU \d+\.\d%\n", said)
    for row, step in zip(lines(tmp_path / "metrics.jsonl"), load_plan(made / "dp").iter_steps(), strict=True):
        assert row["mfu"] > 0
        assert row["predicted_seconds"] == pytest.approx(sum(step.schedule_us.values()) / 1e6)


#: What of the plan's cost model is another than that of the run, and what is said of it. `%s`: what this device is.
DIFFERENCES = {
    "all": (
        lambda cost: CostModel(),
        "Qwen2.5-7B, h100, bf16; this run has qwen2 0.022M, %s, fp32",
        "--model {config} --hardware here.toml --precision fp32",
    ),
    "model": (
        lambda cost: replace(cost, shape=replace(QWEN2_5_7B, name=cost.shape.name)),
        "qwen2 0.022M; this run has qwen2 0.022M of other sizes",
        "--model {config}",
    ),
    "device": (
        lambda cost: replace(cost, hardware=load_hardware("h100")),
        "h100; this run has %s",
        "--hardware here.toml",
    ),
    "other CPU": (
        lambda cost: replace(cost, hardware=replace(cost.hardware, name=calibrated_name("here", "s390x CPU"))),
        "here (s390x CPU); this run has %s",
        "--hardware here.toml",
    ),
    "precision": (lambda cost: replace(cost, precision="bf16"), "bf16; this run has fp32", "--precision fp32"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_plan_for_another_model_or_device_is_not_and_the_run_says_why(made, tmp_path, capsys, monkeypatch, case):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    change, why, build_options = DIFFERENCES[case]
    build_with(made, change(cost_of_a_run(made)), tmp_path / "plan")
    arguments = [*options(made, tmp_path / "run"), "--plan", str(tmp_path / "plan")]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    is_device = case in ("model", "precision")
    nothing = "no times" if is_device else "no times and no MFU"
    assert f"\npredicts  {nothing}: the plan's times are for {why.replace('%s', HERE)}\n" in said
    config = made / "config.json"
    assert f"`chunkplan build` with `{build_options.format(config=config)}`\n" in said
    calibrate = f"`OMP_NUM_THREADS=3 chunkplan calibrate --model {config} --output here.toml`, then\n"
    assert (calibrate in said) == (not is_device)
    assert ("MFU is a share" in said) == is_device
    assert re.search(r"^step 0 \(1/.* s" + (r"  MFU \d+\.\d%$" if is_device else "$"), said, re.M)
    assert not re.search(r"^step .* plan ", said, re.M)
    for row in lines(tmp_path / "run" / "metrics.jsonl"):
        assert row["predicted_seconds"] is None
        assert (row["mfu"] is not None) == is_device


def test_checkpointing_otherwise_than_planned_is_another_time(made, tmp_path, capsys):
    assert main(options(made, tmp_path, "--checkpointing", "keep-attention", "--max-steps", 1)) == 0
    said = capsys.readouterr().err
    planned, here = "--checkpointing none", "--checkpointing keep-attention"
    assert f"predicts  no times: the plan's times are for {planned}; this run has {here}\n" in said
    assert "`chunkplan build` with `--checkpointing keep-attention`\n" in said
    [row] = lines(tmp_path / "metrics.jsonl")
    assert row["predicted_seconds"] is None and row["mfu"] > 0


ALL, RANK_2 = "all weights trained", "adapters of rank 2"

#: The rank that a plan is for, the options of a run, what times are for and what the run has, and what ends that.
ADAPTERS = {
    "unplanned": (0, ("--lora-rank", 2), ALL, RANK_2, "--lora-rank 2"),
    "another": (4, ("--lora-rank", 2), "adapters of rank 4", RANK_2, "--lora-rank 2"),
    "none": (2, ("--lora-rank", 0), RANK_2, ALL, "--lora-rank 0"),
    "some layers": (2, ("--lora-targets", "q_proj"), f"{RANK_2} of all-linear", f"{RANK_2} of q_proj", ""),
    "as planned": (2, (), "", "", ""),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_run_of_adapters_is_compared_with_a_plan_for_them_alone(made, base, tmp_path, capsys, case):
    rank, more, planned, here, helps = ADAPTERS[case]
    build_with(made, replace(cost_of_a_run(made), lora_rank=rank), tmp_path / "plan")
    arguments = ("--plan", tmp_path / "plan", "--model", base, "--output", tmp_path / "run", "--max-steps", 1, *more)
    assert main(list(map(str, arguments))) == 0
    said = capsys.readouterr().err
    [row] = lines(tmp_path / "run" / "metrics.jsonl")
    if case == "as planned":
        assert "predicts" not in said and row["predicted_seconds"] > 0
        assert (tmp_path / "run" / "final" / "adapter_model.safetensors").is_file()
    else:
        assert f"predicts  no times: the plan's times are for {planned}; this run has {here}\n" in said
        assert row["predicted_seconds"] is None
    assert (f"`chunkplan build` with `{helps}`\n" in said) == bool(helps)


def test_a_plan_for_adapters_is_not_for_random_weights(made, tmp_path, capsys):
    build_with(made, replace(cost_of_a_run(made), lora_rank=2), tmp_path / "plan")
    arguments = [*options(made, tmp_path / "run", "--max-steps", 1), "--plan", str(tmp_path / "plan")]
    assert main(arguments) == 2
    assert "the plan is for adapters of rank 2, and random weights need to be trained" in capsys.readouterr().err
    assert main([*arguments, "--lora-rank", "0"]) == 0


def test_times_of_models_that_are_not_known_are_not_to_be_had(made, tmp_path, capsys, tiny_config):
    def said(*arguments):
        assert main(list(map(str, arguments))) == 0
        told = capsys.readouterr().err
        assert "to have them" not in told
        return told

    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(tiny_config("gemma")))
    arguments = [*options(made, tmp_path / "other", "--max-steps", 1), "--model-config", tmp_path / "gemma"]
    told = said(*arguments)
    assert "times are for qwen2 0.022M; this run has a model of type gemma, whose times are not known\n" in told
    assert lines(tmp_path / "other" / "metrics.jsonl")[0]["mfu"] > 0, "of what its own model computes"


def test_a_plan_that_does_not_describe_its_times_says_so(made, tmp_path, capsys):
    build_with(made, None, tmp_path / "plan")
    manifest = json.loads((tmp_path / "plan" / "manifest.json").read_text())
    manifest["predictions"]["cost_model"]["hardware"]["peak_flops"] = -1
    (tmp_path / "plan" / "manifest.json").write_text(json.dumps(manifest))
    assert main([*options(made, tmp_path / "run"), "--plan", str(tmp_path / "plan")]) == 0
    said = capsys.readouterr().err
    assert "predicts  no times and no MFU: the plan does not say what its times are for: `hardware.peak_flops`" in said
    assert all(row["mfu"] is None for row in lines(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.soak
def test_what_the_run_says_to_type_leads_to_a_comparison(made, tmp_path, capsys, monkeypatch):
    """The commands as they are printed, but for smaller chunks to measure, and the plan's own options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    build_with(made, CostModel(), tmp_path / "plan")
    arguments = [*options(made, tmp_path / "run", "--max-steps", 1), "--plan", "plan"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    [calibrate] = re.findall(r"to have them: `(.*?)`, then\n", said)
    [build_options] = re.findall(r"`chunkplan build` with `(.*?)`\n", said)
    small = "--chunk-sizes 16,24,32 --prefixes 32 --repeats 1"
    again = f"chunkplan build {shlex.quote(str(made / 'analysis'))} --output plan --chunk-size 8 --k 2 --global-batch 3"
    for command in (f"{calibrate} {small}", f"{again} {build_options}"):
        environment = {**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
        subprocess.run(command, shell=True, check=True, env=environment, capture_output=True, timeout=120)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main([*arguments, "--output", "compared"]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().err
    assert "predicts" not in said and re.search(r"^step 0 \(1/1\) .* plan .* MFU ", said, re.M)


NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 PCIe": None,
    "NVIDIA H100 NVL": None,
    "NVIDIA H200 NVL": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA A10": None,
    HERE: None,
}


@pytest.mark.parametrize("device", NAMES)
def test_a_profile_that_ships_is_of_the_gpus_it_was_made_for(device):
    assert shipped_profile(device) == NAMES[device]


def test_a_profile_is_of_the_device_it_was_measured_on_or_is_called_after():
    assert is_profile_of(calibrated_name("mine", "NVIDIA A10"), "NVIDIA A10")
    assert not is_profile_of(calibrated_name("h100", "NVIDIA A10"), "NVIDIA H100 80GB HBM3")
    assert is_profile_of("RTX 4090", "NVIDIA GeForce RTX 4090")
    for device, profile in {
        "NVIDIA GeForce RTX 5090": "rtx5090",
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA B200": "b200",
        "NVIDIA L40S": "l40s",
        "NVIDIA L40": None,
        "NVIDIA L4": "l4",
        "NVIDIA RTX A6000": "a6000",
        "NVIDIA RTX 6000 Ada Generation": None,
        "NVIDIA B300 SXM6 AC": "b300",
    }.items():
        assert shipped_profile(device) == profile, device
    assert is_profile_of("h100 pcie", "NVIDIA H100 PCIe")
    assert not any(is_profile_of(name, HERE) for name in ("cpu", HERE, "", "mine"))
