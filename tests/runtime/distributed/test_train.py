"""A run on several processes is the run of one process: losses, norms, checkpoints, the model it leaves."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from chunkplan import PlanConfig, build, load_plan
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.layout import RankLayout
from chunkplan_runtime.models.model import read_config
from chunkplan_runtime.train import main, read_options
from chunkplan_runtime.training import setup
from tests.support import training_checks
from tests.support.analyses import write_analysis
from tests.support.training_cases import (
    all_well,
    run_main_counting_reductions,
    run_main_interrupted,
    run_main_on_gpus,
    run_main_with_versions,
    run_main_without,
    together,
)
from tests.support.training_checks import hidden_files, learning, lines, same_run, same_weights
from tests.support.wait_cases import stalled_main


def options(made, output, *more, plan):
    """Without GPUs, of which there may be too few."""
    return training_checks.options(made, output, "--device", "cpu", *more, plan=plan)


@pytest.mark.parametrize(("plan", "has_links"), [("one", False), ("four", False), ("search", True), ("both", True)])
def test_kernels_are_those_for_stages_that_wait_for_each_other_where_there_are_several(made, plan, has_links):
    config = read_options(options(made, made / "out", plan=plan))
    assert setup._kernels(config, load_plan(made / plan))._has_links == has_links


def test_a_process_that_attends_by_another_kernel_is_named(trainers, made, tmp_path):
    """As where a kernel is not installed, or fails, on one machine: each chooses for itself."""
    arguments = options(made, tmp_path / "out", "--max-steps", 1, plan="search")
    told = together(trainers, 2, arguments, run=run_main_without, missing=["torch-cuda", "torch-cpu"])
    assert [code for code, _ in told] == [0, 0], told
    assert "in fp32, attention torch-cpu (full)\n" in told[0][1]
    assert "attends   otherwise on process 1 of 2 (stage 1 of pipeline 0): reference (full)\n" in told[0][1]


def test_stages_have_the_layers_that_the_plan_says(made, tmp_path):
    config = setup.choose_device(read_options([*map(str, options(made, tmp_path / "run", plan="uneven"))]))
    plan, model_config = load_plan(made / "uneven"), read_config(made / "tied.json")
    for stage, own in enumerate(((0,), (1, 2))):
        job = Job(RankLayout(pp=2, process=stage), SimpleNamespace())
        layers = setup._load_part(config, model_config, plan, job)[0].model.get_decoder().layers
        assert tuple(index for index, layer in enumerate(layers) if list(layer.parameters())) == own


@pytest.mark.parametrize(
    "layouts",
    [
        [
            (4, "both", ("--stage-layers", "1,2")),
            (4, "split", ("--checkpointing", "keep-products:1,none:1,full:1")),
            (2, "equal", ("--sharding", "weights")),
        ],
        pytest.param(
            [
                (4, "split", ("--sharding", "gradients")),
                (4, "uneven", ()),
                (4, "four", ()),
                (2, "four", ("--checkpointing", "full")),
                (2, "search", ("--kv-offload",)),
            ],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["few", "others"],
)
def test_every_layout_trains_as_one_process_does(made, tmp_path, trainers, layouts):
    """Tied embeddings at both ends of a pipeline; an uneven split of three layers; weights sharded during steps."""
    more = ("--precision", "fp64", "--model-config", made / "tied.json")
    more = (*more, "--eval-every", 2, "--save-every", 0, "--max-steps", 3)
    assert main(options(made, tmp_path / "one", *more, plan="one")) == 0
    for place, (size, plan, how) in enumerate(layouts):
        output = tmp_path / f"{place}-{plan}-{size}"
        said = all_well(trainers, size, options(made, output, *more, *how, plan=plan))
        same_run(tmp_path / "one", output)
        assert f"{size} processes" in said
        of_stages = re.search(r"this run has .*--stage-layers 1,2$", said, re.M)
        assert (of_stages is not None) == ("--stage-layers" in how), "which no plan is timed with"
        assert json.loads((output / "measured.json").read_text())["processes"]
        rows = lines(output / "metrics.jsonl")[-1]["processes"]
        assert [row["process"] for row in rows] == list(range(size))
        assert all(row["busy_seconds"] > 0 and 0 <= row["bubble"] < 1 for row in rows)
        assert hidden_files(output) == []


@pytest.mark.soak
def test_a_run_reduces_in_last_backwards(made, tmp_path, trainers):
    """A process without a chunk reduces its layers after all else, no other does. An evaluation is between steps."""
    more = ("--precision", "fp64", "--eval-every", 1, "--save-every", 0, "--max-steps", 3)
    assert main(options(made, tmp_path / "one", *more, plan="one")) == 0
    arguments = options(made, tmp_path / "four", *more, plan="four")
    told = together(trainers, 4, arguments, run=run_main_counting_reductions)
    steps = list(itertools.islice(load_plan(made / "four").iter_steps(), 3))
    num_layers = json.loads((made / "config.json").read_text())["num_hidden_layers"]
    expected = [(0, num_layers * sum(not step.chunks.get(rank) for step in steps)) for rank in range(4)]
    assert [(code, *rest) for code, _, *rest in told] == expected
    same_run(tmp_path / "one", tmp_path / "four")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("more", "changes"),
    [((), {}), ((), {"pp": 2}), (("--sharding", "weights"), {"pp": 2}), (("--sharding", "gradients"), {})],
)
def test_a_process_whose_whole_step_has_no_targets_trains_in_bfloat16(
    more, changes, tiny_config, random_sequences, tmp_path, trainers
):
    """With a head of its own: a chunk that has no targets gives it no gradient, and embeddings one in float32."""
    first, *others = random_sequences([9, 7, 8], seed=4)
    write_analysis(tmp_path / "analysis", [first, *((ids, target & False) for ids, target in others)])
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen2", tie_word_embeddings=False)))
    several = {"dp": 2, **changes}
    for name, size, how in (("one", 1, {}), ("two", 2 * several.get("pp", 1), several)):
        settings = {"chunk_size": 16, "k": 1, "global_batch": 2, "epochs": 2, "cp": "off", **how}
        build(tmp_path / "analysis", tmp_path / name, PlanConfig(**settings))
        words = ("--precision", "bf16", "--save-every", 0, *(more if how else ()))
        all_well(trainers, size, options(tmp_path, tmp_path / f"{name}-run", *words, plan=name))
    found, wanted = learning(tmp_path / "two-run"), learning(tmp_path / "one-run")
    assert len(found) == 4
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-2)
    assert [row["grad_norm"] for row in found] == pytest.approx([row["grad_norm"] for row in wanted], rel=2e-2)


def test_a_process_that_does_not_move_says_where_it_is(made, tmp_path, trainers):
    """And goes on: the other one is late."""
    arguments = options(made, tmp_path / "run", "--max-steps", 1, "--save-every", 0, plan="search")
    (code, _), (other_code, told) = together(trainers, 2, arguments, run=stalled_main)
    assert (code, other_code) == (0, 0)
    who = re.escape("warning: process 1 of 2 (stage 1 of pipeline 0) has not moved for 500.0 ms: ")
    place = r"step 0, rank 0, waiting for chunk \d+ from the stage before"
    assert re.search(rf"^{who}{place}\nhint: if no process moves, ", told, re.M)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(made, tmp_path, trainers, precision):
    more = ("--precision", precision, "--save-every", 2, "--keep-last", 9)
    arguments = options(made, tmp_path / "run", *more, plan="both")
    all_well(trainers, 4, arguments)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert "resumed   at step 2" in all_well(trainers, 4, [*arguments, "--resume"])
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.soak
def test_checkpoints_are_read_by_other_numbers_of_processes(made, tmp_path, trainers):
    """Written by four, read by two; written by those, read by one."""
    more = ("--precision", "fp64", "--save-every", 2, "--keep-last", 9)
    arguments = options(made, tmp_path / "run", *more, plan="four")
    all_well(trainers, 4, arguments)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    for size, step in ((2, 2), (1, 4)):
        shutil.rmtree(tmp_path / "run" / "final")
        for later in range(step + 2, 8, 2):
            shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{later:08d}", ignore_errors=True)
        if size > 1:
            said = all_well(trainers, size, [*arguments, "--resume"])
            assert f"resumed   at step {step}" in said
        else:
            assert main([*arguments, "--resume"]) == 0
    same_run(tmp_path / "run", tmp_path / "whole", tolerance=1e-10)


@pytest.mark.soak
def test_adapters_on_several_processes_are_those_of_one(made, tmp_path, trainers):
    """Only they are trained, held by checkpoints and saved."""
    base = tmp_path / "base"
    assert main(options(made, base, "--max-steps", 1, plan="one")) == 0
    where = (
        "--device",
        "cpu",
        "--plan",
        made / "one",
        "--model",
        base / "final",
        "--lr",
        1e-2,
        "--precision",
        "fp64",
        "--save-every",
        2,
    )
    where = (*where, "--lora-rank", 2)
    one = [str(word) for word in (*where, "--output", tmp_path / "one")]
    both = [str(word) for word in (*where, "--output", tmp_path / "both", "--plan", made / "both")]
    assert main(one) == 0
    all_well(trainers, 4, both)
    same_run(tmp_path / "one", tmp_path / "both")
    assert (tmp_path / "both" / "final" / "adapter_config.json").exists()
    held = [load_file(file) for file in (tmp_path / "both" / "checkpoints" / "step-00000002" / "weights").iterdir()]
    assert all("lora_" in name or name.startswith("step:") for tensors in held for name in tensors)
    shutil.rmtree(tmp_path / "both" / "final")
    all_well(trainers, 2, [*both, "--resume"])
    same_run(tmp_path / "one", tmp_path / "both")


@pytest.mark.soak
def test_processes_that_were_given_different_things_are_refused_once(made, tmp_path, trainers):
    mine = options(made, tmp_path / "run", plan="both")
    other = options(made, tmp_path / "run", plan="search")
    told = together(trainers, 2, other, mine)
    assert [code for code, _ in told] == [2, 2]
    [said] = [text for _, text in told if text]
    hashes = [load_plan(made / name).content_hash[:12] for name in ("search", "both")]
    assert f"do not have the same plan: {hashes[0]}... on process 0; {hashes[1]}... on process 1" in said
    told = together(trainers, 4, mine, mine, options(made, tmp_path / "run", plan="four"))  # which is for other groups
    assert [code for code, _ in told] == [2] * 4
    [said] = [text for _, text in told if text]
    hashes = [load_plan(made / name).content_hash[:12] for name in ("both", "four")]
    assert f"same plan: {hashes[0]}... on processes 0, 1; {hashes[1]}... on processes 2, 3\n" in said
    told = together(trainers, 3, mine)
    assert [code for code, _ in told] == [2] * 3
    [said] = [text for _, text in told if text]
    assert "3 processes cannot share the plan's 2 data-parallel ranks of 2 stages each evenly" in said
    assert "2 or 4 processes" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--lr", "1e-5"), "do not have the same --lr: 0.003 on process 0; 1e-05 on process 1"),
        (("--stage-layers", "1,1"), "do not have the same --stage-layers: "),
        *(
            pytest.param((name, number), f"do not have the same {name}: ", marks=pytest.mark.soak)
            for name, number in (("--save-every", "7"), ("--eval-every", "1"))
        ),
    ],
)
def test_processes_that_were_given_different_options_are_refused_once(made, tmp_path, trainers, more, said):
    arguments = options(made, tmp_path / "run", plan="search")
    told = together(trainers, 2, arguments, [*arguments, *more])
    assert [code for code, _ in told] == [2, 2]
    [printed] = [text for _, text in told if text]
    assert said in printed
    assert not (tmp_path / "run").exists()


def test_processes_with_other_versions_of_a_package_are_refused_by_name(made, tmp_path, trainers):
    arguments, versions = options(made, tmp_path / "run", plan="four"), ["5.17.0", "5.17.0", "5.18.1", "5.17.0"]
    told = together(trainers, 4, arguments, run=run_main_with_versions, versions=versions)
    assert [code for code, _ in told] == [2] * 4
    [said] = [text for _, text in told if text]
    assert "not have the same transformers: 5.17.0 on processes 0, 1, 3; 5.18.1 on process 2\n" in said


def test_processes_that_are_shown_the_same_gpu_are_refused_once(made, tmp_path, trainers):
    arguments = training_checks.options(made, tmp_path / "run", plan="search")
    told = together(trainers, 2, arguments, run=run_main_on_gpus, uuids=["GPU-a", "GPU-a"])
    assert [code for code, _ in told] == [2, 2]
    [said] = [text for _, text in told if text]
    assert "processes 0 and 1 of 2 would share a GPU (GPU-a)" in said and "hint: start as many processes" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_ctrl_c_on_any_process_ends_all_after_the_same_step_and_the_run_goes_on_bit_for_bit(
    made, tmp_path, trainers, who
):
    how = ("--save-every", 4, "--max-steps", 6)
    arguments = options(made, tmp_path / "run", *how, plan="search")
    told = together(trainers, 2, arguments, run=run_main_interrupted, who=who, step=2)
    assert [code for code, _ in told] == [130, 130], told
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert f"stopped; the same command with --resume goes on from {checkpoint}" in told[0][1]
    assert len(learning(tmp_path / "run")) == 3
    assert "resumed   at step 3" in all_well(trainers, 2, [*arguments, "--resume"])
    all_well(trainers, 2, options(made, tmp_path / "whole", *how, plan="search"))
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")


@pytest.mark.soak
def test_a_process_that_is_killed_ends_the_run_which_goes_on_bit_for_bit(made, tmp_path, trainers):
    kill_and_go_on(made, tmp_path, trainers)


def kill_and_go_on(made, tmp_path, trainers):
    """Under torchrun; the message names the process and its step."""
    how = ("--save-every", 2, "--max-steps", 40)
    arguments = options(made, tmp_path / "run", *how, plan="long")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "chunkplan_runtime.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*torchrun, *arguments], text=True, stderr=subprocess.PIPE, env=environment) as run:
        metrics = tmp_path / "run" / "metrics.jsonl"
        give_up = time.monotonic() + 100
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < give_up and run.poll() is None
            time.sleep(0.01)
        [killed] = [process for process in children(run.pid) if environment_of(process)["RANK"] == "1"]
        os.kill(killed, signal.SIGKILL)
        _, said = run.communicate(timeout=100)
    assert run.returncode != 0
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    [step] = re.findall(r"process 1 of 2 \(stage 1 of pipeline 0\) died at step (\d+): ", error)
    assert abs(int(step) - len(lines(metrics))) <= 1
    assert not (tmp_path / "run" / "final").exists()
    all_well(trainers, 2, [*arguments, "--resume"])
    all_well(trainers, 2, options(made, tmp_path / "whole", *how, plan="long"))
    assert learning(tmp_path / "run") == learning(tmp_path / "whole")
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")
    assert hidden_files(tmp_path / "run") == []


def children(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def environment_of(process):
    entries = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
