"""`python -m chunkplan_runtime.train` end to end: it learns, is deterministic, and reports mistakes in a line."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from chunkplan import PlanConfig, build, load_analysis, load_plan
from chunkplan.extras import pip_install
from chunkplan_runtime.train import main
from tests.support.training_checks import (
    SOURCES,
    command,
    cost_of_a_run,
    hidden_files,
    learning,
    lines,
    options,
    same_weights,
)

KEYS = {
    *("step", "epoch", "loss", "target_tokens", "tokens", "grad_norm", "lr", "tokens_per_second", "mfu", "spike"),
    *("peak_memory_bytes", "seconds", "predicted_seconds", "wait_seconds", "source_losses"),
}


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """The output of a whole run in this process."""
    output = tmp_path_factory.mktemp("trained") / "new" / "run"
    assert main(options(made, output)) == 0
    return output


def test_a_run_learns_and_writes_a_line_a_step(made, trained):
    rows = lines(trained / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    assert [row["epoch"] for row in rows] == [step // 2 for step in range(12)]
    assert all(row.keys() == KEYS for row in rows)
    positive = ("target_tokens", "grad_norm", "lr", "tokens_per_second", "mfu", "seconds", "predicted_seconds")
    assert all(row[name] > 0 for row in rows for name in positive)
    predicted = load_plan(made / "plan").steps().column("predicted_us").to_pylist()
    assert [row["predicted_seconds"] for row in rows] == pytest.approx([time / 1e6 for time in predicted])
    assert all(2**26 < row["peak_memory_bytes"] < 2**36 for row in rows)
    assert sum(row["loss"] for row in rows[-2:]) < 0.8 * sum(row["loss"] for row in rows[:2])
    assert hidden_files(trained) == []
    assert not (trained / "checkpoints").exists(), "fewer steps than --save-every"


def test_the_loss_of_each_source_is_there_and_makes_up_the_whole(made, tmp_path):
    assert main(options(made, tmp_path, "--log-sequences", "--max-steps", "4")) == 0
    by_step = {row["step"]: row for row in lines(tmp_path / "metrics.jsonl")}
    sequences = lines(tmp_path / "sequences.jsonl")
    assert len(sequences) == 4 * 3
    for step, row in by_step.items():
        own = [line for line in sequences if line["step"] == step]
        assert sum(line["target_tokens"] for line in own) == row["target_tokens"]
        assert sum(line["loss"] for line in own) / row["target_tokens"] == pytest.approx(row["loss"], rel=1e-6)
        for source, path in enumerate(SOURCES):
            of_it = [line for line in own if (line["sequence_id"] in (0, 2, 3)) == (source == 1)]
            targets = sum(line["target_tokens"] for line in of_it)
            assert (path in row["source_losses"]) == (targets > 0)
            if targets:
                mean = sum(line["loss"] for line in of_it) / targets
                assert row["source_losses"][path] == pytest.approx(mean, rel=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(made, trained, tmp_path):
    assert main(options(made, tmp_path)) == 0
    assert learning(tmp_path) == learning(trained)
    assert same_weights(tmp_path / "final", trained / "final")
    assert main(options(made, tmp_path / "other", "--seed", "1", "--max-steps", "1")) == 0
    assert learning(tmp_path / "other")[0]["loss"] != learning(trained)[0]["loss"]


def test_three_ranks_on_one_process_learn_what_one_does(made, tmp_path):
    for plan in ("plan", "dp"):
        assert main(options(made, tmp_path / plan, "--precision", "fp64", "--max-steps", "4", plan=plan)) == 0
    for one, many in zip(learning(tmp_path / "plan"), learning(tmp_path / "dp"), strict=True):
        # The norms of transformers compute in float32 whatever the dtype.
        assert many.pop("source_losses") == pytest.approx(one.pop("source_losses"), rel=1e-6)
        assert many.pop("spike") == one.pop("spike") == []
        assert many == pytest.approx(one, rel=1e-6)


def test_training_goes_on_from_saved_weights(made, trained, tmp_path, capsys):
    arguments = ["--plan", str(made / "plan"), "--model", str(trained / "final"), "--output", str(tmp_path)]
    assert main([*arguments, "--max-steps", "1", "--max-grad-norm", "0"]) == 0
    rows = lines(tmp_path / "metrics.jsonl")
    assert rows[0]["loss"] < 0.8 * lines(trained / "metrics.jsonl")[0]["loss"]
    assert len(rows) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(len(line) <= 100 for line in printed.err.splitlines() if line.startswith("step"))
    assert str(tmp_path / "final") in printed.err
    assert "chunkplan" not in (tmp_path / "final" / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")


def test_the_last_step_is_the_last_of_all_and_keeps_its_rate_when_resumed(made, tmp_path, capsys):
    """The line counts what is done, also after a resume; the rates of a resumed run are those of transformers."""
    more = ("--lr-schedule", "cosine", "--warmup", "2", "--max-steps", "5", "--save-every", "3")
    assert main(options(made, tmp_path / "run", *more)) == 0
    steps = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert steps == ["step 0 (1/5)", "step 1 (2/5)", "step 2 (3/5)", "step 3 (4/5)", "step 4 (5/5)"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    rate = get_cosine_schedule_with_warmup(optimizer, 2, 5).lr_lambdas[0]
    rates = [3e-3 * rate(step) for step in range(5)]
    assert rates[0] == 0 and [row["lr"] for row in learning(tmp_path / "run")] == rates
    shutil.rmtree(tmp_path / "run" / "final")
    assert main(options(made, tmp_path / "run", *more, "--resume")) == 0
    steps = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert steps == ["step 3 (4/5)", "step 4 (5/5)"]
    assert [row["lr"] for row in learning(tmp_path / "run")] == rates


def test_what_was_resolved_is_stored(made, trained):
    stored = json.loads((trained / "config.json").read_text())
    assert stored["plan"] == json.loads((made / "plan" / "manifest.json").read_text())["content_hash"]
    assert {"chunkplan", "torch", "transformers"} <= stored.keys()
    config = stored["config"]
    assert (config["lr"], config["precision"], config["device"], config["max_steps"]) == (3e-3, "fp32", "cpu", None)
    assert config["analysis"] == str(made / "analysis")


def test_epochs_end_a_run_as_steps_do(made, tmp_path):
    for name, more in {"epochs": ("--max-epochs", "2"), "steps": ("--max-steps", "4")}.items():
        assert main(options(made, tmp_path / name, *more)) == 0
    assert len(learning(tmp_path / "epochs")) == 4
    assert learning(tmp_path / "epochs") == learning(tmp_path / "steps")
    assert main(options(made, tmp_path / "both", "--max-epochs", "2", "--max-steps", "3")) == 0
    assert len(learning(tmp_path / "both")) == 3


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
    assert same_weights(tmp_path / "with" / "final", tmp_path / "less" / "final")


def test_checkpointing_and_offload_learn_the_same(made, trained, tmp_path):
    """To the bit: what is computed again is computed alike, and where keys and values lie does not matter."""
    assert main(options(made, tmp_path, "--checkpointing", "keep-projections", "--kv-offload")) == 0
    assert learning(tmp_path) == learning(trained)


def test_without_torch_it_says_what_to_install(made, tmp_path):
    code = "import sys; sys.modules['torch'] = None; from chunkplan_runtime.train import main; sys.exit(main())"
    done = command(options(made, tmp_path), sys.executable, "-c", code)
    assert done.returncode == 2
    assert pip_install("runtime") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--plan", "no/such/plan"], "there is no plan at no/such/plan"),
        (["--analysis", "no/such/analysis"], "there is no analysis at no/such/analysis"),
        (["--eval-plan", "no/such/plan"], "there is no plan at no/such/plan"),
        (["--model-config", "no/such/file"], "there is no file no/such/file"),
        (["--tokenizer", "./no/such/tokenizer"], "has no tokenizer.json"),
        (["--attention", "no-such-kernel"], "no-such-kernel"),
        (["--device", "cuda:99"], "--device is cuda:99"),
        (["--output", "/dev/null/run"], "cannot write to /dev/null/run"),
    ],
)
def test_a_mistake_exits_2_with_a_hint(made, tmp_path, capsys, more, message):
    assert main(options(made, tmp_path, *more)) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_one_process_is_refused(made, tmp_path, capsys, monkeypatch):
    assert main(options(made, tmp_path, plan="pp")) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert (
        "1 process cannot share the plan's 1 data-parallel rank of 2 stages each" in error and "--pp 1 --output" in hint
    )
    for more, message in (
        (("--stage-layers", "1,1"), "--stage-layers with one stage"),
        (("--sharding", "weights"), "--sharding weights with one process"),
    ):
        assert main(options(made, tmp_path, *more)) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert main(options(made, tmp_path)) == 2
    assert "WORLD_SIZE is 'x'" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(options(made, tmp_path)) == 2
    assert "RANK, MASTER_ADDR, MASTER_PORT is not set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["final", "metrics.jsonl", "checkpoints"])
def test_an_earlier_run_is_never_overwritten(made, tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    assert main(options(made, tmp_path)) == 2
    assert f"{name} of an earlier run is there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_folder_with_the_config_of_a_model_is_never_an_output(made, tmp_path, capsys, more):
    (tmp_path / "config.json").write_text("{}")
    assert main(options(made, tmp_path, *more)) == 2
    assert "is not of a training run" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_refused_run_leaves_no_output(made, tmp_path, capsys):
    """A vocabulary or a context too small for the data, a config that transformers cannot build."""
    config = json.loads((made / "config.json").read_text())
    for change, message, hint in (
        (
            {"vocab_size": 3, "pad_token_id": None},
            "the model's vocabulary has 3",
            "tokenizer that belongs to the model",
        ),
        ({"max_position_embeddings": 39}, "sequence 3 has 40 tokens", "use a model with a longer context"),
        ({"pad_token_id": 97}, "pad_token_id is 97", ""),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert main([*options(made, tmp_path / "run"), "--model-config", str(tmp_path / "config.json")]) in (2, 3)
        told = capsys.readouterr().err
        assert message in told and hint in told
    assert not (tmp_path / "run").exists()


def test_clipping_changes_what_is_learned_and_not_what_is_reported(made, tmp_path):
    for clip in ("0", "0.01"):
        assert main(options(made, tmp_path / clip, "--max-grad-norm", clip, "--max-steps", "3")) == 0
    free, clipped = learning(tmp_path / "0"), learning(tmp_path / "0.01")
    assert clipped[0] == free[0], "the norm is that before clipping"
    assert clipped[0]["grad_norm"] > 0.01
    assert [row["loss"] for row in clipped[1:]] != [row["loss"] for row in free[1:]]


def test_a_mixture_learns_with_the_load_balancing_loss_that_its_config_asks_for(made, tmp_path, tiny_config, capsys):
    experts = {"num_local_experts": 4, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mixtral", **experts)))
    first, shown = {}, {}
    for asked in (None, "batch", "sequence", "none"):
        more = ["--router-loss", asked] if asked else []
        given = options(made, tmp_path / str(asked), "--max-steps", "2", *more)
        given[given.index("--model-config") + 1] = str(tmp_path / "config.json")
        assert main(given) == 0
        first[asked], shown[asked] = lines(tmp_path / str(asked) / "metrics.jsonl"), capsys.readouterr().err
    assert [row["router_loss"] for row in first[None]] == [row["router_loss"] for row in first["batch"]]
    assert first[None][0]["loss"] == first["sequence"][0]["loss"] == first["none"][0]["loss"]
    # Perfectly balanced it is 0.5 times the 2 of 4 experts that a token goes to; by sequence 0.5 times the 2 layers.
    assert all(0.99 < row["router_loss"] < 2 for asked in (None, "sequence") for row in first[asked])
    assert len({first[asked][1]["loss"] for asked in (None, "sequence", "none")}) == 3
    assert all(row.keys() == KEYS for row in first["none"])
    assert "routers   load-balancing loss over the whole batch: each chunk runs forward once more" in shown[None]
    assert "routers   load-balancing loss over each sequence" in shown["sequence"]
    assert "routers" not in shown["none"]


def test_an_output_that_is_a_plan_or_cannot_be_written_is_refused(made, tmp_path, capsys):
    assert main(options(made, made / "plan")) == 2
    assert "is an analysis or a plan" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(options(made, tmp_path / "file" / "run")) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_a_run_whose_first_step_fails_leaves_no_output(made, tmp_path, capsys):
    """A plan that ends too early, a file of tokens that is torn."""
    for torn in ("plan/chunks.parquet", "analysis/tokens/part-00000.arrow"):
        copy = tmp_path / torn.replace("/", "-")
        shutil.copytree(made, copy)
        (copy / torn).write_bytes((copy / torn).read_bytes()[:-200])
        assert main(options(copy, tmp_path / "run")) == 3
        told = capsys.readouterr().err
        assert torn in told and "hint: " in told
        assert not (tmp_path / "run").exists()


def test_how_memory_is_saved_is_what_the_plan_was_timed_with(made, tmp_path, trained):
    """Unless a flag says otherwise."""
    cost = replace(cost_of_a_run(made), checkpointing="full:1,keep-attention:1", kv_offload=True)
    build(made / "analysis", tmp_path / "plan", PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=6), cost=cost)
    for name, flags, expected in (
        ("as planned", [], [True, "full:1,keep-attention:1"]),
        ("not", ["--no-kv-offload", "--checkpointing", "none"], [False, "none"]),
    ):
        arguments = [*options(made, tmp_path / name, *flags, "--max-steps", 1), "--plan", str(tmp_path / "plan")]
        assert main(arguments) == 0
        resolved = json.loads((tmp_path / name / "config.json").read_text())["config"]
        assert [resolved["kv_offload"], resolved["checkpointing"]] == expected
    resolved = json.loads((trained / "config.json").read_text())["config"]
    assert [resolved["kv_offload"], resolved["checkpointing"]] == [False, "none"]


@pytest.mark.parametrize("limit", [10**9, 10])
def test_tokens_that_were_changed_are_refused_or_said_to_be_unknown(made, tmp_path, capsys, monkeypatch, limit):
    """One bit of a token id; only of more tokens than a run reads again nothing is known."""
    shutil.copytree(made / "analysis", tmp_path / "analysis")
    [file] = (tmp_path / "analysis" / "tokens").iterdir()
    ids = load_analysis(tmp_path / "analysis").tokens()(3)[0].tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(ids)] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr("chunkplan_runtime.training.setup.HASHED_TOKENS", limit)
    code = main(options(made, tmp_path / "run", "--analysis", tmp_path / "analysis", "--max-steps", 1))
    told = capsys.readouterr().err
    if limit == 10:
        assert code == 0
        assert "tokens    not compared with their hash: 97 are many; `chunkplan validate " in told
        assert str(tmp_path / "analysis") in told
    else:
        assert code == 3
        assert "content-hash: the tokens are not those the manifest was written for\nhint: files of tokens were" in told
        assert not (tmp_path / "run").exists()
