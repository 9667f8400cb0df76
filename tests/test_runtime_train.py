"""`python -m chunkplan_runtime.train` end to end: it learns, it is deterministic, and mistakes are told in a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from chunkplan import PlanConfig, build
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan_runtime.train import main

KEYS = {"step", "loss", "target_tokens", "grad_norm", "tokens_per_second"}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, random_sequences):
    """A folder with an analysis, a model's config.json, and plans of it."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "analysis").mkdir()
    writer = AnalysisWriter(folder / "analysis")
    for record, (ids, target) in enumerate(random_sequences([25, 6, 14, 40, 3, 9], seed=4)):
        writer.add(0, record, ids.astype(np.int32), target)
    writer.finish(exact=True, sources=[])
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2")))
    for name, options in {"plan": {"epochs": 6}, "dp": {"epochs": 6, "dp": 3}, "pp": {"pp": 2}}.items():
        build(folder / "analysis", folder / name, PlanConfig(chunk_size=8, k=2, global_batch=3, **options))
    return folder


def options(made, output, *more, plan="plan"):
    return [
        *("--plan", str(made / plan), "--model-config", str(made / "config.json")),
        *("--output", str(output), "--lr", "3e-3", *more),
    ]


def metrics(output):
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def learning(output):
    return [{name: row[name] for name in KEYS - {"tokens_per_second"}} for row in metrics(output)]


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """The output of a whole run in this process, and what it printed."""
    output = tmp_path_factory.mktemp("trained") / "new" / "run"
    assert main(options(made, output)) == 0
    return output


def test_a_run_learns_and_writes_a_line_a_step(trained):
    rows = metrics(trained)
    assert [row["step"] for row in rows] == list(range(12))
    assert all(row.keys() == KEYS for row in rows)
    assert all(row["target_tokens"] > 0 and row["grad_norm"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert sum(row["loss"] for row in rows[-2:]) < 0.8 * sum(row["loss"] for row in rows[:2])
    assert [path.name for path in trained.iterdir() if path.name.startswith(".")] == []


def test_the_same_seed_gives_the_same_bits_and_another_does_not(made, trained, tmp_path):
    assert main(options(made, tmp_path)) == 0
    assert learning(tmp_path) == learning(trained)
    mine, other = (load_file(folder / "final" / "model.safetensors") for folder in (tmp_path, trained))
    assert all((mine[name] == other[name]).all() for name in other)
    assert main(options(made, tmp_path / "other", "--seed", "1", "--max-steps", "1")) == 0
    assert learning(tmp_path / "other")[0]["loss"] != learning(trained)[0]["loss"]


def test_three_ranks_on_one_process_learn_what_one_does(made, tmp_path):
    for plan in ("plan", "dp"):
        assert main(options(made, tmp_path / plan, "--dtype", "float64", "--max-steps", "4", plan=plan)) == 0
    for one, many in zip(learning(tmp_path / "plan"), learning(tmp_path / "dp"), strict=True):
        # The norms of transformers compute in float32 whatever the dtype.
        assert many == pytest.approx(one, rel=1e-6)


def test_training_goes_on_from_saved_weights(made, trained, tmp_path, capsys):
    arguments = ["--plan", str(made / "plan"), "--model", str(trained / "final"), "--output", str(tmp_path)]
    assert main([*arguments, "--max-steps", "1", "--clip", "0"]) == 0
    assert metrics(tmp_path)[0]["loss"] < 0.8 * metrics(trained)[0]["loss"]
    assert len(metrics(tmp_path)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(len(line) <= 100 for line in printed.err.splitlines() if line.startswith("step"))
    assert str(tmp_path / "final") in printed.err
    assert "chunkplan" not in (tmp_path / "final" / "config.json").read_text()


def test_a_step_without_targets_changes_nothing(made, tmp_path, handmade_plan, random_sequences):
    ((ids, target),) = random_sequences([12])
    sequences = [(ids, np.zeros(12, bool)), (ids, target)]
    without, learned = [[(0, 0, 8)], [(0, 8, 12)]], [[(1, 0, 12)]]
    for name, steps in {"with": [{0: without}, {0: learned}], "less": [{0: learned}]}.items():
        plan, _ = handmade_plan(sequences, steps)
        assert main([*options(made, tmp_path / name), "--plan", str(plan)]) == 0
    empty, after = learning(tmp_path / "with")
    assert (empty["loss"], empty["grad_norm"], empty["target_tokens"]) == (0.0, 0.0, 0)
    assert after == {**learning(tmp_path / "less")[0], "step": 1}
    mine, other = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("with", "less"))
    assert all((mine[name] == other[name]).all() for name in other)


def command(arguments, *launcher, **environment):
    return subprocess.run(
        [*launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_it_runs_as_a_module_and_under_torchrun(made, tmp_path):
    torchrun = ["torch.distributed.run", "--nproc-per-node", "1", "--master-port", "0", "-m"]
    launchers = {name: [sys.executable, "-m", *more] for name, more in {"python": [], "torchrun": torchrun}.items()}
    for name, launcher in launchers.items():
        done = command(
            options(made, tmp_path / name, "--max-steps", "2", "--dtype", "bfloat16"),
            *launcher,
            "chunkplan_runtime.train",
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert "step 1 of 2  loss" in done.stderr
    assert learning(tmp_path / "python") == learning(tmp_path / "torchrun")


def test_it_needs_nothing_of_the_planner(made, tmp_path):
    absent = ["polars", "ortools", "msgspec", "typer", "rich", "chunkplan.planning", "chunkplan.intake"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from chunkplan_runtime.train import main; "
    done = command(options(made, tmp_path, "--max-steps", "1"), sys.executable, "-c", code + "sys.exit(main())")
    assert done.returncode == 0, done.stderr


def test_without_torch_it_says_what_to_install(made, tmp_path):
    code = "import sys; sys.modules['torch'] = None; from chunkplan_runtime.train import main; sys.exit(main())"
    done = command(options(made, tmp_path), sys.executable, "-c", code)
    assert done.returncode == 2
    assert "pip install 'chunkplan[runtime]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-steps", "0"], "--max-steps is 0"),
        (["--lr", "0"], "--lr is 0.0"),
        (["--lr", "nan"], "--lr is nan"),
        (["--clip", "-1"], "--clip is -1.0"),
        (["--clip", "inf"], "--clip is inf"),
        (["--seed", "-1"], "--seed is -1"),
        (["--plan", "no/such/plan"], "there is no plan at no/such/plan"),
        (["--analysis", "no/such/analysis"], "there is no analysis at no/such/analysis"),
        (["--model-config", "no/such/file"], "there is no file no/such/file"),
        (["--output", "/dev/null/run"], "cannot write to /dev/null/run"),
    ],
)
def test_a_mistake_exits_2_with_a_hint(made, tmp_path, capsys, more, message):
    assert main(options(made, tmp_path, *more)) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("more", [["--dtype", "int8"], ["--max-steps", "x"], ["--model", "both"], ["--no-such"]])
def test_options_that_do_not_parse_exit_2(made, tmp_path, more):
    with pytest.raises(SystemExit) as raised:
        main(options(made, tmp_path, *more))
    assert raised.value.code == 2


def test_a_pipeline_plan_and_more_processes_are_refused(made, tmp_path, capsys, monkeypatch):
    assert main(options(made, tmp_path, plan="pp")) == 2
    assert "hint: build the plan with `--pp 1`" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(options(made, tmp_path)) == 2
    assert "--nproc-per-node 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["final", "metrics.jsonl"])
def test_an_earlier_run_is_never_overwritten(made, tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    assert main(options(made, tmp_path)) == 2
    assert f"{name} of an earlier run is there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_refused_run_leaves_no_output(made, tmp_path, capsys):
    """A vocabulary too small for the data, a config that transformers cannot build, an option that is no number."""
    config = json.loads((made / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 3, "pad_token_id": None}, "the model's vocabulary has 3"),
        ({"pad_token_id": 97}, "pad_token_id is 97"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert main([*options(made, tmp_path / "run"), "--model-config", str(tmp_path / "config.json")]) in (2, 3)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*options(made, tmp_path / "run"), "--max-steps", "abc"])
    assert end.value.code == 2
    assert "hint: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(made, tmp_path, capsys):
    assert main(options(made, tmp_path, "--lr", "1e30", "--clip", "0")) == 1
    assert "not finite" in capsys.readouterr().err
    rows = metrics(tmp_path)
    assert 1 <= len(rows) < 12
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert not (tmp_path / "final").exists()


def test_clipping_changes_what_is_learned_and_not_what_is_reported(made, tmp_path):
    for clip in ("0", "0.01"):
        assert main(options(made, tmp_path / clip, "--clip", clip, "--max-steps", "3")) == 0
    free, clipped = learning(tmp_path / "0"), learning(tmp_path / "0.01")
    assert clipped[0] == free[0], "the norm is that before clipping"
    assert clipped[0]["grad_norm"] > 0.01
    assert [row["loss"] for row in clipped[1:]] != [row["loss"] for row in free[1:]]


def test_an_output_that_is_a_plan_or_cannot_be_written_is_refused(made, tmp_path, capsys):
    assert main(options(made, made / "plan")) == 2
    assert "is an analysis or a plan" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(options(made, tmp_path / "file" / "run")) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_a_run_whose_first_step_fails_leaves_no_output(made, tmp_path, capsys):
    shutil.copytree(made, tmp_path / "made")
    chunks = tmp_path / "made" / "plan" / "chunks.parquet"
    chunks.write_bytes(chunks.read_bytes()[:-9])
    assert main(options(tmp_path / "made", tmp_path / "run")) == 3
    assert "hint: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
