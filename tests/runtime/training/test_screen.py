"""What a run reports about itself: evaluation, spikes, numbers that are not finite, tokenizers, the screen."""

from __future__ import annotations

import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chunkplan import PlanConfig, analyze, build, load_analysis, load_plan
from chunkplan.errors import UsageError
from chunkplan_runtime.execution.loss import SequenceLoss
from chunkplan_runtime.train import main
from chunkplan_runtime.training.final import check_tokenizer
from chunkplan_runtime.training.metrics import SpikeWatch
from chunkplan_runtime.training.run_folder import append_lines, cut_back
from chunkplan_runtime.training.screen import Screen
from tests.support.hub import hub
from tests.support.places import ROOT
from tests.support.training_cases import together
from tests.support.training_checks import SOURCES, after_step, command, learning, lines, options

SAMPLES = ROOT / "sample_data"


def test_held_out_sequences_are_evaluated_as_the_model_itself_would(made, tmp_path):
    """The plan beside the plan, every so often and at the end; the loss is that of plain transformers."""
    assert main(options(made, tmp_path, "--eval-every", 2, "--max-steps", 5, plan="held")) == 0
    rows = lines(tmp_path / "evals.jsonl")
    assert [row["step"] for row in rows] == [1, 3, 4]
    assert json.loads((tmp_path / "config.json").read_text())["config"]["eval_plan"] == str(made / "held-eval")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    evaluation = load_plan(made / "held-eval")
    held_out = {
        segment.sequence_id
        for step in evaluation.iter_steps()
        for chunk in step.chunks[0]
        for segment in chunk.segments
    }
    from chunkplan import load_analysis

    analysis = load_analysis(made / "analysis")
    sums, counts = np.zeros(2), np.zeros(2, int)
    for sequence_id in held_out:
        ids, target = analysis.tokens()(sequence_id)
        labels = np.where(target, ids, -100).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.tensor(ids.astype(np.int64))[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="sum")
        sums[analysis.source[sequence_id]] += loss.item()
        counts[analysis.source[sequence_id]] += target.sum()
    assert rows[-1]["target_tokens"] == counts.sum() > 0
    assert rows[-1]["eval_loss"] == pytest.approx(sums.sum() / counts.sum(), rel=1e-5)
    for path, total, count in zip(SOURCES, sums, counts, strict=True):
        assert rows[-1]["source_losses"].get(path, 0) == pytest.approx(total / max(count, 1), rel=1e-5)


def test_evaluation_changes_nothing_that_is_learned(made, tmp_path):
    for name, every in {"often": 1, "end": 0}.items():
        assert main(options(made, tmp_path / name, "--eval-every", every, "--max-steps", 4, plan="held")) == 0
    assert learning(tmp_path / "often") == learning(tmp_path / "end")


def test_without_held_out_sequences_there_is_no_evaluation(made, tmp_path, capsys):
    assert main(options(made, tmp_path, "--eval-every", 1, "--max-steps", 1)) == 0
    assert not (tmp_path / "evals.jsonl").exists()
    assert "evaluates nothing" in capsys.readouterr().err


def test_an_evaluation_plan_of_another_analysis_is_refused(made, tmp_path, capsys, handmade_plan, random_sequences):
    plan, _ = handmade_plan(random_sequences([12]), [{0: [[(0, 0, 12)]]}])
    assert main(options(made, tmp_path, "--eval-plan", plan)) == 2
    assert "is not of the same analysis as" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_sequences_and_checkpoint(made, tmp_path, capsys):
    assert main(options(made, tmp_path, "--lr", "1e30", "--max-grad-norm", "0", "--save-every", "1")) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    rows = lines(tmp_path / "metrics.jsonl")
    assert 1 <= len(rows) < 12
    assert f"error: step {len(rows)}: not finite: loss nan" in error
    assert "sequence " in error and ".jsonl:" in error
    assert f"step-{len(rows):08d}" in hint
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert not (tmp_path / "final").exists()


def test_an_evaluation_that_is_not_finite_stops_the_run(made, tmp_path, capsys):
    more = ("--lr", "1e30", "--max-grad-norm", "0", "--eval-every", "1")
    assert main(options(made, tmp_path, *more, plan="held")) == 1
    assert "error: evaluation after step 0: not finite: loss nan" in capsys.readouterr().err
    assert not (tmp_path / "final").exists()


def test_a_spike_names_its_worst_sequences(made, tmp_path, monkeypatch, capsys, handmade_plan, random_sequences):
    """Ten steps on one sequence, then one that the model has not seen."""
    sequences = random_sequences([30, 30])
    steps = [{0: [[(0, 0, 30)]]}] * 30 + [{0: [[(1, 0, 30)]]}]
    plan, _ = handmade_plan(sequences, steps)
    arguments = [*options(made, tmp_path, "--lr", "1e-2"), "--plan", str(plan)]
    assert main(arguments) == 0
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if row["spike"]] == [30]
    assert rows[30]["spike"][0].startswith("sequence 1 (") and "loss " in rows[30]["spike"][0]
    assert "step 30 is a spike: sequence 1 (" in capsys.readouterr().err
    assert main([*arguments, "--output", str(tmp_path / "off"), "--loss-spike-factor", "0"]) == 0
    assert not any(row["spike"] for row in lines(tmp_path / "off" / "metrics.jsonl"))


def test_the_watch_knows_the_median_of_fifty_and_goes_on_where_it_was():
    watch = SpikeWatch(2.0)
    assert not any(watch.is_spike(loss) for loss in [9.0, 1.0, 1.0, 1.0, 30.0]), "too few to judge by"
    assert watch.is_spike(2.1) and not watch.is_spike(1.9)
    for _ in range(60):
        watch.is_spike(4.0)
    assert watch.losses == [4.0] * 50
    again = SpikeWatch(2.0, watch.losses)
    assert not again.is_spike(7.9) and again.is_spike(8.1)


def test_lines_are_cut_back_to_the_last_whole_one_before_a_step(tmp_path):
    path = tmp_path / "lines.jsonl"
    cut_back(path, 3)
    assert not path.exists()
    rows = [{"step": step, "text": "ä\n"} for step in (0, 0, 1, 2, 2, 3)]
    append_lines(path, rows[:2])
    append_lines(path, rows[2:])
    cut_back(path, 2)
    assert lines(path) == rows[:3]
    for torn in ('{"step": 1', "\0\0\0\n", "[1]\n", "{}\n"):
        with path.open("a") as file:
            file.write(torn)
        cut_back(path, 9)
        assert lines(path) == rows[:3]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A plan of a few real records, with the tokenizer that made it, and a model for it."""
    folder = tmp_path_factory.mktemp("chats")
    few = (SAMPLES / "math.jsonl").read_text().splitlines()[:4]
    (folder / "few.jsonl").write_text("\n".join(few) + "\n")
    analyze([folder / "few.jsonl"], folder / "analysis", tokenizer=SAMPLES / "tokenizer")
    build(folder / "analysis", folder / "plan", PlanConfig(chunk_size=512, k=1, global_batch=4, epochs=4))
    return folder


def train_chats(chats, output, *more):
    return main(
        [
            *("--plan", str(chats / "plan"), "--output", str(output), "--max-steps", "1"),
            *("--model-config", str(SAMPLES / "model" / "config.json"), *map(str, more)),
        ]
    )


def test_the_tokenizer_goes_with_the_weights_to_the_byte(chats, tmp_path, capsys):
    assert train_chats(chats, tmp_path / "run", "--tokenizer", SAMPLES / "tokenizer") == 0
    for file in (SAMPLES / "tokenizer").iterdir():
        assert (tmp_path / "run" / "final" / file.name).read_bytes() == file.read_bytes()
    final = tmp_path / "run" / "final"
    text = "a sequence of whole numbers"
    expected = AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(final)(text)["input_ids"] == expected
    arguments = ["--plan", str(chats / "plan"), "--model", str(final), "--output", str(tmp_path / "next")]
    assert main(arguments) == 0
    assert (tmp_path / "next" / "final" / "tokenizer.json").is_file(), "by itself from there on"
    capsys.readouterr()
    assert train_chats(chats, tmp_path / "none") == 0
    assert "none goes with the weights" in capsys.readouterr().err
    assert not (tmp_path / "none" / "final" / "tokenizer.json").exists()


def test_samples_are_what_transformers_generates_from_the_weights_of_that_step(chats, tmp_path, capsys):
    """And a run that samples learns as one that does not, to the bit; a resumed one goes on with its lines."""
    how = ("--tokenizer", SAMPLES / "tokenizer", "--lr", "1e-2", "--warmup", 0, "--max-steps", 4, "--save-every", 2)
    asks = ("--sample-every", 2, "--sample-prompt", "What is 3 + 4?")
    assert train_chats(chats, tmp_path / "run", *how, *asks) == 0
    rows = lines(tmp_path / "run" / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [(1, "What is 3 + 4?"), (3, "What is 3 + 4?")]
    assert "sample after step 3: " in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").eval()
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    end = tokenizer.eos_token_id
    found = model.generate(**asked, max_new_tokens=128, do_sample=False, eos_token_id=end, pad_token_id=end)
    said = tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert rows[1]["text"] == said
    assert train_chats(chats, tmp_path / "plain", *how) == 0
    assert learning(tmp_path / "run") == learning(tmp_path / "plain")
    for folder in ("final", "checkpoints/step-00000004"):
        shutil.rmtree(tmp_path / "run" / folder)
    assert train_chats(chats, tmp_path / "run", *how, *asks, "--resume") == 0
    assert lines(tmp_path / "run" / "samples.jsonl") == rows


def test_samples_that_cannot_be_made_are_refused(chats, made, trainers, tmp_path, capsys):
    asks = ("--sample-every", 2, "--sample-prompt", "Hello")
    assert train_chats(chats, tmp_path / "run", *asks) == 2
    assert "--sample-prompt: the model has no tokenizer\nhint: give --tokenizer" in capsys.readouterr().err
    assert train_chats(chats, tmp_path / "run", "--sample-every", 2) == 2
    assert "--sample-every without --sample-prompt would do nothing" in capsys.readouterr().err
    told = together(trainers, 2, options(made, tmp_path / "two", "--device", "cpu", *asks, plan="two"))
    assert [code for code, _ in told] == [2, 2]
    [said] = [text for _, text in told if text]
    assert "--sample-every with 2 processes: each has a part of the model or of its optimizer" in said


def test_what_is_pushed_to_the_hub_is_final(chats, tmp_path):
    """Model and tokenizer to the byte; what cannot be is said before the first step, or with how to try again."""
    with hub() as server:
        how = ["--plan", chats / "plan", "--model-config", SAMPLES / "model" / "config.json", "--max-steps", 1]
        how += ["--tokenizer", SAMPLES / "tokenizer", "--push-to-hub", "me/mine"]

        def run(name, token):
            home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
            words = map(str, [*how, "--output", tmp_path / name])
            launcher = (sys.executable, "-m", "chunkplan_runtime.train")
            return command(list(words), *launcher, HF_TOKEN=token, HF_HUB_DISABLE_XET="1", **home)

        refused = run("refused", "wrong")
        assert refused.returncode == 2 and "error: --push-to-hub me/mine: " in refused.stderr
        assert "run `hf auth login`" in refused.stderr and not (tmp_path / "refused").exists()
        ran = run("run", "secret")
        assert ran.returncode == 0, ran.stderr
        assert f"uploaded  {server.url}/me/mine/commit/1\n" in ran.stderr
        final = {path.name: path.read_bytes() for path in (tmp_path / "run" / "final").iterdir()}
        assert {"model.safetensors", "tokenizer.json"} <= final.keys()
        assert {name: server.files["me/mine"][name] for name in final} == final
        server.refuses_uploads = True
        failed = run("failed", "secret")
        assert failed.returncode == 1 and (tmp_path / "failed" / "final" / "model.safetensors").exists()
        assert f"hf upload me/mine {tmp_path / 'failed' / 'final'} does it again" in failed.stderr


def test_a_run_says_at_the_start_how_it_learns(made, base, tmp_path, capsys):
    """By default all weights with 1e-5 and adapters with 2e-4, each after 3 % of warm-up and down a cosine to 0."""
    by_default = options(made, tmp_path, plan="plan")[:6]
    for name, model, rate in (
        ("all", by_default[2:4], "1e-05"),
        ("adapters", ["--model", str(base), "--lora-rank", "2"], "0.0002"),
    ):
        assert main([*by_default[:2], *model, "--output", str(tmp_path / name), "--max-steps", "5"]) == 0
        said = f"learns    adamw, learning rate {rate}, after 1 step of warm-up, cosine to 0, weight decay 0.01, "
        assert said + "gradients clipped at 1\n" in capsys.readouterr().err
        rates = [row["lr"] / float(rate) for row in learning(tmp_path / name)]
        assert rates == pytest.approx([0, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
        assert json.loads((tmp_path / name / "config.json").read_text())["config"]["lr"] == float(rate)


def test_a_tokenizer_that_encodes_the_same_is_taken_however_it_was_saved(chats, tmp_path):
    AutoTokenizer.from_pretrained(SAMPLES / "tokenizer").save_pretrained(tmp_path / "saved")
    assert train_chats(chats, tmp_path / "run", "--tokenizer", tmp_path / "saved") == 0
    analysis = load_analysis(chats / "analysis")
    analysis.manifest["tokenizer"]["content_hash"] = "0" * 64
    with pytest.raises(UsageError, match="is not the tokenizer that the data was made with"):
        check_tokenizer([tmp_path / "saved" / "tokenizer.json"], analysis, 4096)


def test_the_umask_says_who_may_read_what_a_run_leaves(chats, tmp_path):
    """Also of files that come from ones which only their owner may read, and of checkpoints."""
    shutil.copytree(SAMPLES / "tokenizer", tmp_path / "tokenizer")
    for path in (tmp_path / "tokenizer").iterdir():
        path.chmod(0o600)
    mask = os.umask(0o027)
    try:
        assert train_chats(chats, tmp_path / "run", "--tokenizer", tmp_path / "tokenizer", "--save-every", 1) == 0
    finally:
        os.umask(mask)
    run = tmp_path / "run"
    modes = {str(path.relative_to(run)): (path.is_dir(), path.stat().st_mode & 0o777) for path in run.rglob("*")}
    assert {"final/model.safetensors", "final/tokenizer.json", "checkpoints"} <= modes.keys()
    assert {name: mode for name, mode in modes.items() if mode not in ((True, 0o750), (False, 0o640))} == {}


def test_a_tokenizer_that_does_not_belong_is_refused(chats, made, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(SAMPLES / "tokenizer", other)
    written = json.loads((other / "tokenizer.json").read_text())
    written["model"]["merges"][0], written["model"]["merges"][1] = written["model"]["merges"][1::-1]
    (other / "tokenizer.json").write_text(json.dumps(written))
    assert train_chats(chats, tmp_path / "run", "--tokenizer", other) == 2
    assert "is not the tokenizer that the data was made with" in capsys.readouterr().err
    assert main(options(made, tmp_path / "run", "--tokenizer", SAMPLES / "tokenizer")) == 2
    assert "has 4,096 tokens, the model's vocabulary 97" in capsys.readouterr().err
    (other / "tokenizer.json").write_text("{}")
    assert main(options(made, tmp_path / "run", "--tokenizer", other)) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


ROW = {
    "step": 1233,
    "loss": 12.34567,
    "grad_norm": 1.2345,
    "tokens_per_second": 123456.7,
    "mfu": 0.4123,
    "peak_memory_bytes": 130 << 30,
    "seconds": 12.345,
    "predicted_seconds": 11.5,
}


def test_elsewhere_there_are_plain_lines_of_120_columns_at_most(capsys):
    with Screen(0, 10000) as screen:
        screen.show_step(ROW)
    [line] = capsys.readouterr().err.splitlines()
    assert len(line) <= 120
    for part in ("loss 12.3457", "grad 1.23 ", "123,457 tok/s", "MFU 41.2%", "130.0 GiB", "12.35 s", "plan 11.50 s"):
        assert part in line


def test_a_full_gpu_is_reported_with_what_to_do(made, tmp_path, monkeypatch, capsys):
    def fill():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    after_step(monkeypatch, 1, fill)
    assert main(options(made, tmp_path, "--save-every", "1")) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "Tried to allocate 2 GiB" in error
    assert "--checkpointing" in hint and "step-00000001" in hint


def test_losses_of_sequences_that_are_not_finite_come_first(made):
    from chunkplan import load_analysis
    from chunkplan_runtime.training.metrics import describe_worst

    analysis = load_analysis(made / "analysis")
    losses = [SequenceLoss(index, loss, 2) for index, loss in enumerate([1.0, 8.0, float("nan"), 2.0])]
    assert describe_worst(losses, analysis) == ["sequence 2 (long.jsonl:3), loss nan"]
    assert [words.split(" (")[0] for words in describe_worst(losses[:2], analysis)] == ["sequence 1", "sequence 0"]
    many = describe_worst([SequenceLoss(0, float("inf"), 1)] * 5, analysis)
    assert len(many) == 4 and many[-1] == "and 2 more"
