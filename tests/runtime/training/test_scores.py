"""`chunkplan score`: log-probabilities of chunks are those of whole sequences, from any layout of processes."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import PlanConfig, build, load_analysis
from chunkplan_runtime.train import main
from chunkplan_runtime.training import scores
from chunkplan_runtime.training.run_folder import RunFolder
from tests.support.analyses import write_analysis
from tests.support.step_loss_cases import log_probs_of
from tests.support.training_cases import together


@pytest.fixture(scope="module")
def made(tmp_path_factory, random_sequences):
    """Plans of two epochs of an analysis, for layouts of processes."""
    folder = tmp_path_factory.mktemp("plans")
    write_analysis(folder / "analysis", random_sequences([25, 6, 14, 40, 5, 9, 17, 4], seed=4))
    layouts = {"one": {}, "four": {"dp": 4}, "stages": {"pp": 2}, "both": {"dp": 2, "pp": 2}, "sharing": {"dp": 2}}
    for name, layout in layouts.items():
        how = {"cp": "auto" if name == "sharing" else "off", "epochs": 2}
        build(folder / "analysis", folder / name, PlanConfig(chunk_size=8, k=2, global_batch=3, **how, **layout))
    return folder


@pytest.fixture(scope="module")
def model(tiny_config, tmp_path_factory):
    """The folder of a saved model of three layers."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(**tiny_config("qwen2", num_hidden_layers=3))
    folder = tmp_path_factory.mktemp("saved")
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
    return folder


def options(made, model, output, *more, plan="one"):
    where = ["--plan", made / plan, "--model", model, "--output", output, "--device", "cpu", "--precision", "fp64"]
    return [*map(str, (*where, *more))]


def read(folder):
    return pl.read_parquet(folder / "*.parquet").sort("sequence_id")


@pytest.fixture(scope="module")
def scored(made, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored") / "scores"
    assert main(options(made, model, folder), scores=True) == 0
    return folder


def test_log_probabilities_are_those_of_whole_sequences(made, model, scored):
    analysis = load_analysis(made / "analysis")
    sequences = [analysis.tokens()(number) for number in range(analysis.num_sequences)]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        log_probs, _, ids, positions = (each.numpy() for each in log_probs_of(whole, sequences))
    found = read(scored)
    assert found["sequence_id"].to_list() == np.unique(ids).tolist()
    for number, row in enumerate(found.iter_rows(named=True)):
        own = ids == found["sequence_id"][number]
        assert row["positions"] == positions[own].tolist()
        assert row["num_target_tokens"] == own.sum() == len(row["log_probs"])
        assert row["log_probs"] == pytest.approx(log_probs[own], rel=1e-6)
        assert row["log_prob"] == pytest.approx(log_probs[own].sum(), rel=1e-8)  # norms of transformers are in float32
        assert analysis.record[row["sequence_id"]] == row["record"]


MORE = [pytest.param(plan, 2, marks=pytest.mark.soak) for plan in ("four", "stages", "sharing")]


@pytest.mark.parametrize(("plan", "size"), [("both", 4), *MORE])
def test_processes_and_stages_give_the_scores_of_one_process(made, model, scored, trainers, tmp_path, plan, size):
    told = together(trainers, size, options(made, model, tmp_path / "scores", plan=plan), scores=True)
    assert [code for code, _ in told] == [0] * size, told
    assert ["perplexity" in text for _, text in told] == [True] + [False] * (size - 1)
    found, wanted = read(tmp_path / "scores"), read(scored)
    assert found.drop("log_prob", "log_probs").equals(wanted.drop("log_prob", "log_probs"))
    assert found["log_prob"].to_list() == pytest.approx(wanted["log_prob"].to_list(), rel=1e-12)


def test_a_run_that_stopped_goes_on_behind_its_last_file(made, model, scored, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scores, "FILE_TOKENS", 1)
    assert main(options(made, model, tmp_path), scores=True) == 0
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1 and read(tmp_path).equals(read(scored))
    before, last = capsys.readouterr().err, files[-1].read_bytes()
    files[-1].unlink()
    files[-1].with_suffix(".tmp").write_bytes(b"half")
    assert main(options(made, model, tmp_path), scores=True) == 0
    assert sorted(tmp_path.iterdir()) == files and files[-1].read_bytes() == last
    after = capsys.readouterr().err
    assert f" 1 of {len(files)} steps left" in after
    assert after.splitlines()[-2:] == before.splitlines()[-2:], "the mean is of all steps"


def test_a_folder_that_cannot_be_written_or_is_at_use_is_refused(made, model, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(options(made, model, tmp_path / "file"), scores=True) == 2
    assert f"cannot write {tmp_path / 'file'}" in capsys.readouterr().err
    (at_work := RunFolder(tmp_path)).lock()
    assert main(options(made, model, tmp_path), scores=True) == 2
    assert "another run is at work" in capsys.readouterr().err
    at_work.unlock()


def test_scores_of_others_are_not_gone_on_with(made, model, scored, tmp_path, capsys):
    assert main([*options(made, model, scored), "--precision", "fp32"], scores=True) == 2
    assert "has scores of another plan, model or precision" in capsys.readouterr().err
    (tmp_path / "notes.txt").touch()
    assert main(options(made, model, tmp_path), scores=True) == 2
    assert "has other files than scores: notes.txt" in capsys.readouterr().err
    (tmp_path / "notes.txt").rename(tmp_path / "steps-00000000-00000000.parquet")
    assert main(options(made, model, tmp_path), scores=True) == 3
    assert "not Parquet" in capsys.readouterr().err


def test_options_that_train_are_none_of_it(made, model, tmp_path, capsys):
    assert main(options(made, model, tmp_path, "--lr", 1), scores=True) == 2
    assert "unrecognized arguments: --lr 1" in capsys.readouterr().err
