"""`ChunkTrainer` on several processes: the samples, losses and weights of one, and those of `chunkplan train`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import PlanConfig, build
from chunkplan_runtime.training.config import SHARED
from tests.support.analyses import write_analysis
from tests.support.hf_cases import chunk_trainer_here
from tests.support.mixed_chunks import LENGTHS, MIXED
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.shared_plans import given_blocks
from tests.support.training_cases import all_well
from tests.support.training_checks import lines, same_weights


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    """A model, and plans of eleven sequences over two epochs: on two ranks, three, one, two stages, and sharing."""
    folder = tmp_path_factory.mktemp("sharded")
    lengths = [25, 6, 14, 40, 5, 9, 17, 4, 33, 8, 12]
    analysis = write_analysis(folder / "analysis", random_sequences(lengths, seed=4))
    layouts = {"two": {"dp": 2}, "three": {"dp": 3}, "one": {}, "stages": {"pp": 2}, "shared": {"dp": 2, "cp": "auto"}}
    for name, layout in layouts.items():
        with given_blocks({40: (0, 2, 2), 33: (0, 2, 1)}) if name == "shared" else given_blocks({}):
            config = PlanConfig(
                **{"chunk_size": 8, "k": 2, "global_batch": 3, "epochs": 2, "holdout": 2, "cp": "off"} | layout
            )
            build(analysis, folder / name, config, workers=1)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config("qwen2", tie_word_embeddings=True)))
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def run(made, trainers, tmp_path):
    """`run(size, plan, output, own=..., settings...)` -> what each process has left, and what it said."""

    def trained(size, plan, output, *, own=None, **how):
        names = ("adapters", "dtype", "like", "resume", "seeds", "on", "model")
        more = {"model": made / "model", **{name: how.pop(name) for name in names if name in how}}
        settings = {"output_dir": str(tmp_path / output), "save_strategy": "no", "disable_tqdm": True, **how}
        where = {"plan": plan if isinstance(plan, Path) else made / plan, "port": free_port(), "size": size}
        return trainers.run(size, chunk_trainer_here, settings=settings, own=own, **where, **more)

    return trained


@pytest.fixture
def unequal(handmade_plan, random_sequences):
    """Three steps: 3 chunks beside 4, none beside all, and all beside none."""
    steps = [{0: MIXED[:3], 1: MIXED[3:]}, {0: [[]], 1: MIXED}, {0: MIXED, 1: [[]]}]
    return handmade_plan(random_sequences(LENGTHS), steps, k=2, dp=2)[0]


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


@pytest.mark.parametrize("sharding", ["weights", *(pytest.param(each, marks=pytest.mark.soak) for each in SHARED[:2])])
def test_mixed_precision_is_that_of_one_process(sharding, run):
    """Autocast keeps casts of weights, which processes gather and give back."""
    how = {"dtype": torch.float32, "bf16": True, "max_steps": 4}
    [(one, _)] = run(1, "one", "one", **how)
    steps = [log for log in one["logs"] if "loss" in log]
    assert len(steps) == 4
    for left, _ in run(2, "two", "two", own={"sharding": sharding}, **how):
        found = [log for log in left["logs"] if "loss" in log]
        assert [log["loss"] for log in found] == pytest.approx([log["loss"] for log in steps], rel=1e-5)
        assert [log["grad_norm"] for log in found] == pytest.approx([log["grad_norm"] for log in steps], rel=1e-4)


@pytest.mark.parametrize("sharding", ["optimizer", "weights", pytest.param("gradients", marks=pytest.mark.soak)])
def test_it_leaves_the_bits_of_the_trainers_command(sharding, made, unequal, run, trainers, tmp_path):
    """In float32, with the same optimizer object, groups, clipping and rates; some ranks have nothing to do."""
    asked = {"precision": "fp32", "sharding": sharding, "max-grad-norm": 0.5, "lr-schedule": "cosine", "warmup": 2}
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    command = ["--plan", str(unequal), "--model", str(made / "model"), "--max-steps", "3", "--lr", "3e-2", *flags]
    all_well(trainers, 2, [*command, "--output", str(tmp_path / "command")])
    ours = run(
        *(2, unequal, "ours"), own={"sharding": sharding}, dtype=torch.float32, max_grad_norm=0.5,
        like=[*command, "--output", str(tmp_path / "command")],
    )  # fmt: skip
    assert same_weights(tmp_path / "command" / "final", tmp_path / "ours" / "final")
    rows = lines(tmp_path / "command" / "metrics.jsonl")
    expected = [(torch.tensor(row["loss"]).item(), row["grad_norm"]) for row in rows]  # it logs losses in float32
    assert min(norm for _, norm in expected) > 0.5, "clipped"
    for left, _ in ours:
        assert [(log["loss"], log["grad_norm"]) for log in left["logs"]] == expected


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("two", {}),
        ("two", {"own": {"sharding": "weights", "kv_offload": True}, "gradient_checkpointing": True}),
        ("shared", {"max_grad_norm": 0}),
        pytest.param("two", {"own": {"sharding": "gradients"}, "optim": "sgd"}, marks=pytest.mark.soak),
        pytest.param("two", {"optim": "adagrad"}, marks=pytest.mark.soak),
        pytest.param("two", {"optim": "rmsprop"}, marks=pytest.mark.soak),
        pytest.param("two", {"adapters": True, "own": {"sharding": "weights"}}, marks=pytest.mark.soak),
    ],
)
def test_two_processes_learn_what_one_learns(plan, how, run, tmp_path):
    """To rounding, in float64: losses, norms, evaluations, counts of tokens and what a script saves at the end."""
    asked = {"eval_strategy": "steps", "eval_steps": 3, "include_num_input_tokens_seen": "all"}
    alone = {name: value for name, value in how.items() if name != "own"}
    [(one, _)] = run(1, "one" if plan == "shared" else plan, "one", **asked, **alone)
    (first, said), (second, nothing) = run(2, plan, "two", **asked, **how)
    assert first == second
    assert said.count("'eval_loss'") == 3 and said.count("set by the plan") == 1
    assert "eval_loss" not in nothing and "set by the plan" not in nothing
    assert (first["flops"], first["eval_loss"]) == (one["flops"], pytest.approx(one["eval_loss"], rel=1e-10))
    for mine, other in zip(first["logs"], one["logs"], strict=True):
        assert mine == pytest.approx(other, rel=1e-9)
    if "adapters" in how:
        name = "adapter_model.safetensors"
        mine, other = (load_file(tmp_path / each / "final" / name) for each in ("two", "one"))
    else:
        mine, other = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert mine.keys() == other.keys() and mine
    assert all(torch.allclose(mine[name], other[name], rtol=1e-7, atol=1e-9) for name in other)


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["weights", "adapters"])
def test_a_run_goes_on_bit_for_bit_and_on_one_process_too(adapters, run, tmp_path):
    """From the middle of an epoch; and the best model of all is loaded at the end."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_strategy": "steps"}
    how = {**best, "save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "adapters": adapters}
    whole = run(2, "two", "whole", **how)
    for size, place in ((2, "again"), (1, "alone")):
        shutil.copytree(tmp_path / "whole", tmp_path / place)
        shutil.rmtree(tmp_path / place / "checkpoint-4")
        shutil.rmtree(tmp_path / place / "checkpoint-6")
        shutil.rmtree(tmp_path / place / "final")
        left = run(size, "two", place, resume=True, **how)
        for (mine, _), (other, _) in zip(left, whole, strict=False):
            pairs = zip(mine["logs"], other["logs"], strict=True)
            for here, there in pairs:
                assert here == (there if size == 2 else pytest.approx(there, rel=1e-9))
        if size == 2:
            [name] = [each.name for each in (tmp_path / "whole" / "final").glob("*model.safetensors")]
            mine, other = (load_file(tmp_path / each / "final" / name) for each in (place, "whole"))
            assert all(torch.equal(mine[each], other[each]) for each in other)
    (first, _), (second, _) = whole
    losses = [entry["eval_loss"] for entry in first["logs"] if "eval_loss" in entry]
    assert first["eval_loss"] == second["eval_loss"] == min(losses)


@pytest.mark.parametrize("what", ["stops", "logs"])
def test_what_a_callback_of_one_process_asks_for_is_done_by_all(what, run):
    left = run(2, "two", "run", on=(1, what, 2))
    steps = 1 if what == "logs" else 2
    assert [[entry["step"] for entry in each["logs"] if "loss" in entry] for each, _ in left] == [
        [*range(1, steps + 1)]
    ] * 2


def test_who_fails_ends_the_others(run):
    """Which wait for it in C++, where only a watchdog can end them, with its exit status."""
    with pytest.raises(AssertionError) as ended:
        run(2, "two", "run", on=(1, "fails", 2))
    assert str(ended.value) == "rank 0:\nended with 1"


@pytest.mark.parametrize(
    ("size", "plan", "how", "message"),
    [
        (2, "three", {}, r"2 processes cannot share the plan's 3 data-parallel ranks evenly.*chunkplan build --like"),
        (2, "stages", {}, r"the plan is for 2 pipeline stages.*`chunkplan train --nproc 2`"),
        (2, "two", {"use_cpu": False}, r"2 processes were started, and each takes itself.*use_cpu=True"),
        (2, "two", {"seeds": [1, 2]}, r"the processes do not have the same weights"),
        (2, "two", {"optim": "adafactor"}, r"optim='adafactor' is not known to work on rows.*adamw_torch"),
        (2, "two", {"own": {"sharding": "weights"}, "dtype": torch.bfloat16}, r"sum gradients in bfloat16.*optimizer"),
        (1, "two", {"own": {"sharding": "weights"}}, r"sharding='weights' with one process.*torchrun"),
        (1, "two", {"own": {"sharding": "all"}}, r"sharding is 'all', expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_on_these_processes_is_refused_on_each(size, plan, how, message, run):
    for error, _ in run(size, plan, "run", **how):
        assert re.search(message, str(error)), error


SCRIPT = """
import os, signal, sys
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments
from chunkplan_runtime import ChunkTrainer

class Dies(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
args = TrainingArguments(sys.argv[3], use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
ChunkTrainer(model, args=args, plan=sys.argv[2], callbacks=[Dies()]).train()
"""


@pytest.mark.soak
def test_a_process_that_dies_is_named_where_no_launcher_sees_it(made, tmp_path):
    """As on another machine: the one that is left says who died, at which step, and how to go on."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", SCRIPT, str(made / "model"), str(made / "two"), str(tmp_path / "run")]
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**environment, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in "01"
    ]
    (_, said), _ = (each.communicate(timeout=120) for each in both)
    assert [each.returncode for each in both] == [1, -9]
    assert re.search(r"^error: process 1 of 2 \(data parallel\) died at step 2: ", said, re.M), said
    assert "`trainer.train(resume_from_checkpoint=True)` goes on" in said


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "accelerate.commands.launch"])
def test_the_example_runs_under_launchers_and_goes_on(launcher, made, tmp_path):
    """What one process prints is there once."""
    accelerate = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    how = ["--nproc-per-node", "2"] if launcher.startswith("torch") else [*accelerate, "--dynamo_backend", "no"]
    example = str(ROOT / "examples" / "chunk_trainer.py")
    command = [
        sys.executable,
        "-m",
        launcher,
        *how,
        example,
        str(made / "model"),
        str(made / "two"),
        str(tmp_path / "run"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"^{'eval_loss': \d", done.stdout, re.M)) == 1, done.stdout
        assert (tmp_path / "run" / "final" / "model.safetensors").exists()
