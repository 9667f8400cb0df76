"""Planned steps in stock trainers on two processes: the rows of the plan, the losses of one process, and resuming."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import Trainer
from trl import SFTTrainer

from chunkplan import PlanConfig, build, load_analysis, load_plan
from chunkplan.errors import DataError, UsageError
from chunkplan.lengths import row_lengths
from chunkplan_runtime.adapters.transformers import with_plan, with_plan_step
from tests.support.places import ROOT
from tests.support.planned_steps import write_analysis
from tests.support.ports import free_port
from tests.support.stock_trainer_cases import CAP, MICRO_BATCHES, new_trainer, online, rows_of, run

LENGTHS = [
    3,
    38,
    7,
    12,
    20,
    5,
    9,
    31,
    4,
    6,
    17,
    8,
    2,
    25,
    11,
    10,
    13,
    3,
    6,
    22,
    14,
    5,
    9,
    7,
    30,
    4,
    8,
    12,
    6,
    16,
    3,
    10,
]
CONSTANT = {"lr_scheduler_type": "constant"}
BATCH, STEPS = 8, 4  # sequences of a step, and steps of an epoch
PLAN = {"chunk_size": CAP, "k": 1, "global_batch": BATCH, "epochs": 2, "micro_batches": MICRO_BATCHES, "cp": "off"}


def launch(script: Path, *words: object, **environment: str) -> None:
    """Run a script on two processes."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, str(script), *map(str, words)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows, and plans of them for one rank and for two."""
    folder = tmp_path_factory.mktemp("stock")
    random = np.random.default_rng(3)
    np.savez(folder / "rows.npz", *[random.integers(2, 64, length) for length in LENGTHS])
    np.save(folder / "lengths.npy", row_lengths(rows_of(folder)))
    build(folder / "lengths.npy", folder / "plan", PlanConfig(**PLAN, dp=2))
    build(folder / "lengths.npy", folder / "plan-1", PlanConfig(**PLAN | {"chunk_size": 2 * CAP}))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """All cases of `stock_trainer_cases`, by process."""
    launch(ROOT / "tests" / "support" / "stock_trainer_cases.py", folder, "stock")
    return [json.loads((folder / f"stock-{rank}.json").read_text()) for rank in range(2)]


def steps_of(found, case: str) -> list[list[int]]:
    """The rows of each step, of the micro-batches of both processes."""
    numbers = range(0, 2 * STEPS * MICRO_BATCHES, MICRO_BATCHES)
    return [flat(batch for each in found for batch in each[case]["batches"][at:][:MICRO_BATCHES]) for at in numbers]


def flat(lists) -> list[int]:
    return list(chain.from_iterable(lists))


class InOrder(Trainer):
    """Plain `Trainer` on one process, in the order of its rows."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset)


def assert_as_one_process(found, case: str, folder: Path, tolerance: float) -> None:
    rows = rows_of(folder).select([row for step in steps_of(found, case) for row in step])
    plain = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    expected = run(new_trainer(InOrder, folder, rows, **plain))
    for each in found:
        np.testing.assert_allclose(each[case]["losses"], expected["losses"], rtol=1e-6)
        np.testing.assert_allclose(each[case]["weights"], expected["weights"], rtol=tolerance)


@pytest.mark.parametrize("case", ["plan", "plan sft"])
def test_a_step_has_the_rows_of_the_plan(found, folder, case: str) -> None:
    plan = load_plan(folder / "plan")
    for rank, each in enumerate(found):
        assert each[case]["batches"] == [batch for step in plan.iter_steps() for batch in step.sequences(rank)]


@pytest.mark.parametrize(
    ("case", "tolerance"), [("plan", 1e-11), ("online", 1e-11), ("plan sft", 1e-5), ("online sft", 1e-5)]
)
def test_losses_and_weights_are_those_of_one_process(found, folder, case: str, tolerance: float) -> None:
    """Processes have different numbers of target tokens; SFTTrainer computes its loss in float32."""
    assert_as_one_process(found, case, folder, tolerance)


@pytest.mark.parametrize("case", ["plan", "online"])
def test_a_run_resumed_within_the_second_epoch_goes_on_at_its_step(found, case: str) -> None:
    for each in found:
        assert each[f"{case} resumed"]["weights"] == each[case]["weights"]
        assert each[f"{case} resumed"]["losses"] == each[case]["losses"]
    for each in found[: case == "plan"]:  # workers of a loader have a collator of their own
        assert each[f"{case} resumed"]["batches"] == each[case]["batches"][5 * MICRO_BATCHES :]


def test_steps_planned_online_take_each_row_once_an_epoch_and_keep_the_cap(found) -> None:
    steps = steps_of(found, "online")
    epochs = [flat(steps[:STEPS]), flat(steps[STEPS:])]
    assert [sorted(rows) for rows in epochs] == [[*range(len(LENGTHS))]] * 2 and epochs[0] != epochs[1]
    for each in found:
        assert each["online"]["batches"] == each["online sft"]["batches"]
        assert all(rows and sum(LENGTHS[row] for row in rows) <= CAP for rows in each["online"]["batches"])


def test_what_the_first_process_refuses_all_refuse(found) -> None:
    assert [each["refused"] for each in found] == ["process 0: cannot be"] * 2
    first, other = (each["broken"] for each in found)
    assert first.startswith("UnsentError('broken', ") and f"the first process failed: {first}" in other


@pytest.mark.parametrize("kind", ["plan", "online"])
def test_one_process_needs_no_torch_distributed_and_evaluates_as_before(folder, kind: str) -> None:
    made = with_plan(Trainer, folder / "plan-1") if kind == "plan" else with_plan_step(Trainer, cap=2 * CAP)
    trainer = new_trainer(made, folder, per_device_train_batch_size=4, num_train_epochs=2)
    found = run(trainer)
    assert sorted(flat(found["batches"][: STEPS * MICRO_BATCHES])) == [*range(len(LENGTHS))]
    plain = new_trainer(Trainer, folder)
    plain.model = trainer.model
    assert trainer.evaluate(rows_of(folder))["eval_loss"] == plain.evaluate(rows_of(folder))["eval_loss"]


def refused(trainer, kind: type[Exception], words: str, hint: str = ".") -> None:
    with pytest.raises(kind, match=words) as error:
        trainer.train()
    assert re.search(hint, error.value.hint)


@pytest.mark.parametrize("name", ["micro_batches", "split", "dp", "step", "targets", "pp", "cp"])
def test_options_that_follow_from_the_trainer_are_refused_at_once(name: str) -> None:
    with pytest.raises(UsageError, match=f"with_plan_step takes no {name}: it follows from the trainer"):
        with_plan_step(Trainer, cap=300, **{name: 3})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bogus": 1}, "plan_step has no option 'bogus'"),
        ({"epochs": 2}, "plan_step has no option 'epochs'"),
        ({"cap": 0}, "chunk-size is 0"),
        ({"cost": "h100"}, "cost is str"),
        ({"equal_chunks": True}, "equal-chunks has no effect"),
    ],
)
def test_options_that_plan_step_does_not_take_are_refused_at_once(options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_plan_step(Trainer, **{"cap": 300} | options)


@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
        ({"gradient_accumulation_steps": 3}, "=3, the plan has micro-batches: 2", "es 3`, or .*_accumulation_steps=2$"),
        ({"num_train_epochs": 3}, "num_train_epochs=3, the plan has 8 steps, epochs: 2", "set num_train_epochs=2"),
        ({"max_steps": 9}, "max_steps=9, the plan has 8 steps", "set max_steps=8 or less"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True does not go", "leave it out"),
        ({"accelerator_config": {"dispatch_batches": True}}, "does not take planned batches", "no dispatch_batches"),
    ],
)
def test_settings_that_are_not_the_plans_are_refused(folder, settings: dict, words: str, hint: str) -> None:
    refused(new_trainer(with_plan(Trainer, folder / "plan-1"), folder, **settings), UsageError, words, hint)


@pytest.mark.parametrize("count", [None, "fewest"])
def test_a_plan_without_a_number_of_micro_batches_is_refused_with_the_option_that_gives_one(
    folder, tmp_path, count
) -> None:
    build(folder / "lengths.npy", tmp_path / "plan", PlanConfig(**PLAN | {"micro_batches": count}))
    trainer = new_trainer(with_plan(Trainer, tmp_path / "plan"), folder)
    words = f"steps=2, the plan has micro-batches: {count or 'not given'}"
    refused(trainer, UsageError, words, "^build the plan with `--micro-batches 2`$")


def test_a_plan_for_other_ranks_is_refused_with_the_command_for_these(folder) -> None:
    trainer = new_trainer(with_plan(Trainer, folder / "plan"), folder)
    refused(trainer, UsageError, "the plan is for dp 2 and pp 1, processes: 1")


def test_padding_is_refused(folder) -> None:
    trainer = new_trainer(online(SFTTrainer), folder, padding_free=False)
    refused(trainer, UsageError, "padding_free=False does not go")


def test_rows_that_are_not_the_plans_are_refused_by_name(folder) -> None:
    made, rows = with_plan(Trainer, folder / "plan-1"), rows_of(folder)
    refused(new_trainer(made, folder, rows.select(range(31))), DataError, "has 31 rows, the plan is of 32 sequences")
    changed = [ids[:-1] if row == 5 else ids for row, ids in enumerate(rows["input_ids"])]
    words = r"lengths.npy, row 5: 5 tokens, row 5 of the dataset has 4"
    refused(new_trainer(made, folder, rows.from_dict({"input_ids": changed})), DataError, words)


def test_rows_that_the_analysis_left_out_may_be_among_the_others(tmp_path) -> None:
    found = build(write_analysis(tmp_path / "a", [4, 9, 2]), tmp_path / "plan", PlanConfig(chunk_size=9, k=1))
    analysis = load_analysis(found.analysis_path)
    assert analysis.rows_in(np.array([4, 9, 2, 0])).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"d\.jsonl:2: 9 tokens, row 1 of the dataset has 8"):
        analysis.rows_in(np.array([4, 8, 2, 0]))


@pytest.mark.parametrize(
    ("lengths", "settings", "kind", "words"),
    [
        ([5, 0, 7, 3], {}, DataError, "row 1 of the dataset: 0 tokens, expected 1 to 40"),
        ([5, 41, 7, 3], {}, DataError, "row 1 of the dataset: 41 tokens, expected 1 to 40"),
        ([5, 3, 7], {}, UsageError, "0 of 3 rows, all processes 2 micro-batches"),
        ([5, 3, 7, 4, 9], {"dataloader_drop_last": False}, UsageError, "1 of 5 rows, all processes 2 micro-batches"),
        ([5, 40, 40, 40], {}, DataError, "do not go into 1 x 2 micro-batches"),
    ],
)
def test_rows_that_no_step_can_have_are_refused_before_training(folder, lengths, settings, kind, words) -> None:
    rows = rows_of(folder).from_dict({"input_ids": [[2] * length for length in lengths]})
    trainer = new_trainer(online(Trainer), folder, rows, **settings)
    refused(trainer, kind, words)
    assert trainer.state.global_step == 0


class Endless(IterableDataset):
    """Rows that nobody can count."""

    def __iter__(self):
        return iter([{"input_ids": [1], "labels": [1]}])


def test_a_dataset_without_a_length_is_refused(folder) -> None:
    trainer = new_trainer(online(Trainer), folder, max_steps=3)
    trainer.train_dataset = Endless()
    refused(trainer, UsageError, "does not take planned batches")


def test_a_dataset_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="the rows of a list cannot be measured"):
        row_lengths([{"text": "a"}])
    assert row_lengths([{"input_ids": [1, 2]}, {"input_ids": [3]}]).tolist() == [2, 1]


def test_a_checkpoint_of_another_plan_is_refused(folder, tmp_path) -> None:
    made = with_plan(Trainer, folder / "plan-1")
    run(new_trainer(made, folder, output_dir=str(tmp_path), save_strategy="steps", max_steps=5))
    build(folder / "lengths.npy", tmp_path / "other", PlanConfig(**PLAN | {"chunk_size": 2 * CAP, "seed": 7}))
    trainer = new_trainer(with_plan(Trainer, tmp_path / "other"), folder)
    with pytest.raises(UsageError, match=r"a checkpoint of another plan: plan\.seed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


@pytest.fixture(scope="module")
def begun(folder):
    """A checkpoint of a run whose steps are planned as it goes."""
    made = with_plan_step(Trainer, cap=2 * CAP)
    run(new_trainer(made, folder, output_dir=str(folder / "begun"), save_strategy="steps", max_steps=5, **CONSTANT))
    return folder / "begun" / "checkpoint-5"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rows": slice(None, None, -1)}, "the hash of their lengths, in order, was"),
        ({"rows": slice(31)}, "the number of rows was 32, is 31; the hash"),
        ({"seed": 7}, "data_seed was 42, is 7$"),
        ({"data_seed": 7}, "data_seed was 42, is 7$"),
        ({"per_device_train_batch_size": 4}, "the number of rows a step was 4, is 8$"),
        ({"gradient_accumulation_steps": 4}, "the number of rows a step was 4, is 8$"),
        ({"dataloader_drop_last": False}, "dataloader_drop_last was true, is false$"),
    ],
)
def test_a_run_planned_as_it_goes_is_not_resumed_with_other_steps(folder, begun, settings, words) -> None:
    rows = rows_of(folder)
    rows = rows.select(range(len(LENGTHS))[settings.get("rows", slice(None))])
    settings = {name: value for name, value in settings.items() if name != "rows"}
    trainer = new_trainer(with_plan_step(Trainer, cap=2 * CAP), folder, rows, **CONSTANT | settings)
    with pytest.raises(UsageError, match=f"(?m)a checkpoint of another plan: {words}"):
        trainer.train(resume_from_checkpoint=str(begun))


def test_a_run_planned_as_it_goes_goes_on_for_more_steps_of_another_cap(folder, begun) -> None:
    """Which has the same rows in a step."""
    trainer = new_trainer(with_plan_step(Trainer, cap=2 * CAP - 1), folder, max_steps=7, **CONSTANT)
    assert trainer.train(resume_from_checkpoint=str(begun)).global_step == 7


def test_axolotls_trainer_has_the_rows_of_the_plan(folder) -> None:
    """By its plugins; its own sampler would give every process a share of what is meant for one."""
    pytest.importorskip("axolotl.core.training_args", reason="axolotl has its own versions of transformers and TRL")
    launch(ROOT / "tests" / "support" / "stock_trainer_cases.py", folder, "axolotl", ACCELERATE_USE_CPU="true")
    plan = load_plan(folder / "plan")
    found = [json.loads((folder / f"axolotl-{rank}.json").read_text()) for rank in range(2)]
    for rank, each in enumerate(found):
        assert each["plan"]["batches"] == [batch for step in plan.iter_steps() for batch in step.sequences(rank)]
    assert sorted(flat(steps_of(found, "online")[:STEPS])) == [*range(len(LENGTHS))]


@pytest.mark.soak
def test_the_own_test_of_transformers_passes_with_ours(tmp_path) -> None:
    """Its checkout is the folder `transformers` of CHUNKPLAN_PEERS."""
    checkout = Path(os.environ.get("CHUNKPLAN_PEERS", tmp_path), "transformers")
    script = checkout / "tests" / "trainer" / "distributed" / "scripts" / "batch_rebalance_ddp.py"
    if not script.is_file():
        pytest.skip("no checkout of transformers: set CHUNKPLAN_PEERS to a folder that has it as transformers")
    (tmp_path / "in_place.py").write_text(
        "import runpy, sys, transformers\n"
        "from chunkplan_runtime.adapters.transformers import with_plan_step\n"
        "transformers.Trainer = with_plan_step(transformers.Trainer, cap=16)\n"
        f"sys.argv[0] = {str(script)!r}\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    launch(tmp_path / "in_place.py", "--output_dir", tmp_path / "out", ACCELERATE_USE_CPU="true")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["ok"], result
