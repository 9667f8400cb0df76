"""Callbacks of transformers are called at the moments that docs/training.md names, and what they ask for is done."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from chunkplan.errors import UsageError
from chunkplan_runtime.train import main, read_options
from chunkplan_runtime.training.callbacks import LOGGED, LOGGED_OF_EVALUATIONS
from chunkplan_runtime.training.processes import train_alone
from chunkplan_runtime.training.run_folder import RunFolder
from tests.runtime.training.test_best import STOPPING, evaluations
from tests.support.places import ROOT
from tests.support.training_cases import run_with_one_callback, together
from tests.support.training_checks import learning, lines, options

MOMENTS = re.findall(r"^\| `(on_\w+)` \|", (ROOT / "docs" / "training.md").read_text(encoding="utf-8"), re.M)


class Recorder(TrainerCallback):
    """Notes each moment with what it sees there."""

    def __init__(self):
        self.seen = []
        self.logs = []
        self.metrics = []
        self.states = []


def _note(moment):
    def note(self, args, state, control, model=None, optimizer=None, **more):
        assert isinstance(state, TrainerState) and isinstance(control, TrainerControl)
        assert model is not None and optimizer.param_groups
        assert args.max_steps == state.max_steps
        if moment in ("on_pre_optimizer_step", "on_optimizer_step"):
            has_gradients = any(weight.grad is not None for weight in model.parameters())
            assert has_gradients == (moment == "on_pre_optimizer_step")
        self.seen.append((moment, state.global_step))
        self.logs += [more["logs"]] if "logs" in more else []
        self.metrics += [more["metrics"]] if "metrics" in more else []
        self.states.append(state)

    return note


for _moment in MOMENTS:
    setattr(Recorder, _moment, _note(_moment))


def train(made, output, callbacks, *more, plan="twenty"):
    train_alone(read_options([*options(made, output, *more, plan=plan)]), callbacks)


def test_every_moment_comes_in_its_order(made, tmp_path):
    recorder = Recorder()
    train(made, tmp_path, [recorder], "--max-steps", 4, "--eval-every", 2, "--save-every", 3, plan="held")
    of_step = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")
    expected = [("on_train_begin", 0)]
    for step, epoch in enumerate([row["epoch"] for row in learning(tmp_path)]):
        if step == 0 or epoch != learning(tmp_path)[step - 1]["epoch"]:
            expected += [("on_epoch_end", step)] if step else []
            expected += [("on_epoch_begin", step)]
        expected += [(moment, step + (moment in ("on_step_end", "on_log"))) for moment in of_step]
        expected += [("on_log", step + 1), ("on_evaluate", step + 1)] if step in (1, 3) else []
        expected += [("on_save", step + 1)] if step == 2 else []
    expected += [("on_epoch_end", 4), ("on_train_end", 4)]
    assert recorder.seen == expected
    assert {moment for moment, _ in recorder.seen} == set(MOMENTS), "that is all that are documented"
    of_steps = [logs for logs in recorder.logs if "loss" in logs]
    for logs, row in zip(of_steps, lines(tmp_path / "metrics.jsonl"), strict=True):
        assert all(logs[logged] == row[name] for name, logged in LOGGED.items() if row.get(name) is not None)
    for metrics, row in zip(recorder.metrics, lines(tmp_path / "evals.jsonl"), strict=True):
        assert all(metrics[logged] == row[name] for name, logged in LOGGED_OF_EVALUATIONS.items())
    state = recorder.states[-1]
    assert state.num_input_tokens_seen == sum(row["tokens"] for row in learning(tmp_path))
    assert [logs["step"] for logs in state.log_history if "loss" in logs] == [1, 2, 3, 4]


class Asks(TrainerCallback):
    """Evaluates and saves after the first step, not after the second one, and stops after the third."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 3


def test_what_a_callback_asks_for_is_done(made, tmp_path, capsys):
    train(made, tmp_path, [Asks()], "--eval-every", 2, "--save-every", 2)
    assert [row["step"] for row in learning(tmp_path)] == [0, 1, 2]
    assert [step for step, _ in evaluations(tmp_path)] == [0]
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["step-00000001"]
    assert (tmp_path / "final" / "model.safetensors").exists()
    assert "stopped   by a callback, after 3 of 40 steps" in capsys.readouterr().err


def test_early_stopping_of_transformers_stops_where_ours_does(made, tmp_path):
    assert main(options(made, tmp_path / "ours", *STOPPING, plan="twenty")) == 0
    its = [word for word in STOPPING if word not in ("--early-stopping", 2)]
    train(made, tmp_path / "its", [EarlyStoppingCallback(2)], *its, "--keep-best")
    assert learning(tmp_path / "its") == learning(tmp_path / "ours")


class EndsEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = True


def test_the_end_of_an_epoch_is_refused(made, tmp_path):
    with pytest.raises(UsageError, match="should_epoch_stop in on_step_end"):
        train(made, tmp_path, [EndsEpoch()])


def test_what_one_process_asks_for_all_do(made, trainers, tmp_path):
    arguments = options(made, tmp_path, "--device", "cpu", "--save-every", 0, plan="pair")
    together(trainers, 2, arguments, run=run_with_one_callback, steps=2)
    assert [row["step"] for row in learning(tmp_path)] == [0, 1]
    assert (tmp_path / "final" / "model.safetensors").exists()


def scalars(folder):
    """What tensorboard would show: by name, steps and values of all event files below a folder."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            [length] = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])  # between two checksums
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
            data = data[16 + length :]
    return found


def test_tensorboard_has_the_metrics_by_their_documented_names(made, tmp_path, capsys):
    """The run says where they are."""
    more = ("--report-to", "tensorboard", "--max-steps", 3, "--eval-every", 2)
    assert main(options(made, tmp_path, *more, plan="twenty")) == 0
    [logs] = re.findall(r"^tracked   tensorboard --logdir (\S+)$", capsys.readouterr().err, re.M)
    found = scalars(Path(logs))
    rows = lines(tmp_path / "metrics.jsonl")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3]
    assert [value for _, value in found["train/loss"]] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert [value for _, value in found["eval/loss"]] == pytest.approx([x for _, x in evaluations(tmp_path)], rel=1e-6)
    documented = re.findall(r"`((?:train|eval)/\w+)`", (ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
    named = {name.replace("eval_", "eval/") if "eval_" in name else f"train/{name}" for name in LOGGED.values()}
    named |= {name.replace("eval_", "eval/") for name in LOGGED_OF_EVALUATIONS.values()}
    assert named | {"train/epoch"} == set(documented)
    assert found.keys() <= named | {"train/epoch"}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_there_is_refused_with_what_to_install(made, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(f"transformers.integrations.integration_utils.is_{name}_available", lambda: False)
    assert main(options(made, tmp_path / "run", "--report-to", name)) == 2
    said = capsys.readouterr().err
    assert f"--report-to {name} does not work: RuntimeError: " in said and f"requires {name} to be installed" in said
    assert f"\nhint: install {name} and set it up" in said
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_does_not_work_is_named_with_what_it_says(made, tmp_path, capsys, monkeypatch):
    """It has settings of its own, so that is no bug of ours."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    assert main(options(made, tmp_path / "run", "--report-to", "tensorboard")) == 2
    said = capsys.readouterr().err
    assert "error: --report-to tensorboard does not work: NotADirectoryError: " in said and "Traceback" not in said
    assert said.endswith("hint: install tensorboard and set it up as it asks for, or leave it out of --report-to\n")


#: A `wandb` that writes what it is asked to begin into a file.
WANDB = """
import json, pathlib
run = None
class Config(dict):
    def update(self, *given, **how):
        pass
config = Config()
def init(**how):
    global run
    pathlib.Path(__file__).with_name("asked.json").write_text(json.dumps(how))
    run = type("Run", (), {"name": how.get("name"), "summary": {}, "url": "", "_label": lambda *given, **how: None})()
    return run
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *given, **how: None
"""


def test_runs_have_the_name_and_project_that_are_asked_for(made, tmp_path, monkeypatch, capsys):
    (tmp_path / "site" / "wandb" / "sdk" / "lib").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text(WANDB)
    (tmp_path / "site" / "wandb" / "sdk" / "lib" / "config_util.py").write_text("class ConfigError(Exception): pass\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("WANDB_PROJECT", "else")
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: True)
    for name, more, expected in (
        ("plain", (), ("plain", "else")),
        ("named", ("--run-name", "first", "--wandb-project", "mine"), ("first", "mine")),
    ):
        for module in [module for module in sys.modules if module.partition(".")[0] == "wandb"]:
            monkeypatch.delitem(sys.modules, module)  # it has one run in a process
        arguments = options(made, tmp_path / name, "--report-to", "wandb", "--max-steps", 1, *more)
        assert main(arguments) == 0, capsys.readouterr().err
        asked = json.loads((tmp_path / "site" / "wandb" / "asked.json").read_text())
        assert (asked["name"], asked["project"]) == expected
    assert main(options(made, tmp_path / "none", "--wandb-project", "mine")) == 2
    assert "--wandb-project without --report-to would do nothing" in capsys.readouterr().err


def test_an_unknown_tracker_is_refused(made, tmp_path, capsys):
    assert main(options(made, tmp_path / "run", "--report-to", "papyrus")) == 2
    assert "expected tensorboard or wandb or mlflow" in capsys.readouterr().err
