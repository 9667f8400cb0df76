"""`chunkplan build` on GPUs and models that a plan may not fit: what it says of memory and of positions."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command_line import SMALL_MODEL
from tests.support.command_line import run_here as run
from tests.support.places import ROOT
from tests.support.published_models import QWEN3_NEXT

#: A model with few positions.
CONFIG = SMALL_MODEL | {"max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lengths, 9,000 short ones and two long ones, and with the configuration of a small model."""
    folder = tmp_path_factory.mktemp("data")
    lengths = np.random.default_rng(0).integers(1, 50, 9000).astype(np.int32)
    lengths[[17, 8500]] = 4097, 9000
    np.save(folder / "lengths.npy", lengths)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def built(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The document and the messages of `build`."""
    ran = run(folder, "build", "lengths.npy", *words, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--global-batch", "1"),  # in two blocks of steps
        ("--dp", "2", "--epochs", "2", "--holdout", "0.1"),
        ("--pp", "3", "--dp", "2", "--k", "3", "--tp", "2"),
        ("--pp", "2", "--schedule", "interleaved", "--checkpointing", "full"),
    ],
    ids=" ".join,
)
def test_build_knows_the_memory_that_inspect_finds_in_the_plan(data: Path, options: tuple[str, ...]) -> None:
    """...of the same step, rank and stage; a dry run knows it too."""
    words = ("--model", ".", "--chunk-size", "512", *(() if "--k" in options else ("--k", "1")), *options)
    document, _ = built(data, *words)
    inspected = json.loads(run(data, "inspect", "--json").stdout)
    assert document["memory"] == inspected["memory"]
    assert document["memory"]["memory"]["kv"] > 0
    assert built(data, *words, "--dry-run")[0]["memory"] == document["memory"]
    total = document["memory"]["memory"]["total"] / 2**30
    row = f"GPU memory .*{total:.1f} GiB of 79.0 GiB on the fullest GPU"
    for command in (("build", "lengths.npy", *words), ("inspect",)):
        assert re.search(row, run(data, *command).stdout)


@pytest.mark.parametrize(
    ("options", "helps"),
    [
        ("", "weights, gradients and optimizer alone are too much, whatever the chunks: more GPUs, by --pp or --dp"),
        ("--pp 8 --chunk-size 65536", "a smaller --chunk-size or --k, or --checkpointing full"),
        *(
            pytest.param(options, helps, marks=pytest.mark.soak)
            for options, helps in (
                ("--pp 8 --checkpointing full", "train with --kv-offload, which keeps keys and values (KV)"),
                (
                    "--dp 8 --cp off --chunk-size 8192 --k 4",
                    "a smaller --chunk-size or --k, or --checkpointing full; and train with --kv-offload",
                ),
                (
                    "--dp 8 --cp off --chunk-size 65536 --checkpointing full",
                    "a smaller --chunk-size or --k, or --checkpointing offload; and train with --kv-offload",
                ),
            )
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_helps(tmp_path: Path, options: str, helps: str) -> None:
    """The command that the hint names runs as it is and finds something that fits."""
    longest = 2_600_000 if "--pp" in options and "full" in options else 300_000
    np.save(tmp_path / "lengths.npy", np.array([longest, *[300] * 40], np.int32))
    words = options.split() if "--chunk-size" in options else ("--chunk-size", "2048", *options.split())
    document, said = built(tmp_path, "--k", "1", *words)
    total = document["memory"]["memory"]["total"]
    assert not document["memory"]["fits"] and total > document["memory"]["gpu_bytes"]
    assert f"warning: Qwen2.5-7B takes {total / 2**30:,.1f} GiB a GPU in step 0, h100 has 79.0 GiB: " in said
    assert f"hint: {helps}" in said
    assert "`chunkplan tune ANALYSIS --gpus N`" in " ".join(run(tmp_path, "inspect").stdout.split())
    assert ": does not fit" in run(tmp_path, "build", "lengths.npy", "--k", "1", *words, columns=120).stdout
    tune = re.search("`(chunkplan tune .*)` finds what fits", said)
    assert tune
    ran = run(tmp_path, *shlex.split(tune[1])[1:], "--chunk-sizes", "2048,8192", "--ks", "1")
    assert "─ recommended ─" in ran.stdout, ran.stderr


def test_levels_are_chosen_layer_by_layer_where_that_is_asked_for(tmp_path: Path) -> None:
    """None where everything fits."""
    tokens = np.random.default_rng(0).lognormal(6.3, 1.5, 400)
    np.save(tmp_path / "lengths.npy", np.clip(tokens, 1, 100_000).astype(np.int32))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ("--chunk-size", "8192", "--k", "4", "--pp", "4", "--schedule", "1f1b", "--global-batch", "32")
    for model, expected in (((), "[a-z-]+:[0-9]+,.*"), (("--model", "."), "none")):
        document, said = built(tmp_path, *options, *model, "--checkpointing", "auto")
        assert document["memory"]["fits"]
        [chosen] = re.findall("chosen: --checkpointing (.*)", said)
        assert re.fullmatch(expected, chosen)
        manifest = json.loads((tmp_path / "chunkplan-out" / "plan" / "manifest.json").read_text())
        assert manifest["predictions"]["cost_model"]["checkpointing"] == chosen
        assert built(tmp_path, *options, *model, "--checkpointing", chosen)[0]["memory"] == document["memory"]


def test_a_plan_that_fits_is_no_cause_for_a_warning(data: Path) -> None:
    document, said = built(data, "--model", "config.json", "--chunk-size", "512", "--k", "1", "--dry-run")
    assert document["memory"]["fits"]
    assert "a GPU in step" not in said and "larger than any sequence" not in said


def test_the_memory_that_is_tuned_for_is_that_a_plan_has_to_fit(data: Path) -> None:
    """...with --auto; what is given beside it may take more."""
    options = ("--auto", "--model", ".", "--dp", "2", "--gpu-memory", "24GiB")
    document, said = built(data, *options)
    assert document["memory"]["gpu_bytes"] == 24 << 30
    assert document["memory"]["fits"] and "warning: qwen2 0.5B takes" not in said
    assert json.loads(run(data, "inspect", "--json").stdout)["memory"] == document["memory"]
    tuned = run(data, "tune", "lengths.npy", *options[1:], "--output", "tune.json")
    assert tuned.returncode == 0, tuned.stderr
    assert built(data, "--auto", "--from", "tune.json")[0]["memory"] == document["memory"]


def test_a_plan_that_fits_is_not_replaced_by_one_that_does_not_without_force(data: Path, tmp_path: Path) -> None:
    words = ("build", str(data / "lengths.npy"), "--model", str(data), "--hardware", "l4", "--k", "1")
    assert run(tmp_path, *words, "--chunk-size", "512").returncode == 0
    kept = (tmp_path / "chunkplan-out" / "plan" / "manifest.json").read_bytes()
    larger = (*words, "--chunk-size", "16384")
    ran = run(tmp_path, *larger)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "is a plan that fits: it was not replaced\nhint: --dry-run shows where the memory goes" in ran.stderr
    assert (tmp_path / "chunkplan-out" / "plan" / "manifest.json").read_bytes() == kept
    assert run(tmp_path, *larger, "--dry-run").returncode == 0
    assert run(tmp_path, *larger, "--force").returncode == 0
    assert run(tmp_path, *larger).returncode == 0, "neither fits"


def test_a_chunk_size_that_splits_nothing_is_said(data: Path) -> None:
    options = ("--model", ".", "--k", "4")
    _, said = built(data, *options, "--chunk-size", "1048576")
    assert "warning: ChunkSize 1,048,576 is larger than any sequence (the longest has 9,000 tokens)" in said
    assert "`chunkplan tune lengths.npy --model . --gpus 8` chooses one" in said
    assert "A rank's step has " in said
    for others in (
        ("--chunk-size", "9000"),
        ("--chunk-size", "9001", "--global-batch", "900"),
        ("--chunk-size", "9001", "--no-split"),
    ):
        assert "larger than any sequence" not in built(data, *options, *others)[1]


@pytest.mark.parametrize(
    "command",
    [
        ("build", "--chunk-size", "512", "--k", "1"),
        pytest.param(("tune", "--chunk-sizes", "512", "--ks", "1"), marks=pytest.mark.soak),
    ],
)
def test_sequences_over_the_positions_of_the_model_are_counted(data: Path, command: tuple[str, ...]) -> None:
    """Before anybody rents a GPU for a trainer that refuses them. Of a model nobody names, nothing is known."""
    name, *options = command
    words = (name, "lengths.npy", *options, "--model", ".", "--json")
    ran = run(data, *words)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    positions = (document if name == "build" else document["data"])["positions"]
    assert positions == {"max_positions": 4096, "num_sequences": 9000, "num_over": 2, "longest": 9000}
    assert "warning: 2 of 9,000 sequences have more than the 4,096 tokens that qwen2 0.5B takes" in ran.stderr
    assert "--max-length 4096 --overlong truncate" in ran.stderr
    stretched = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}
    (data / "stretched.json").write_text(json.dumps(CONFIG | stretched))
    ran = run(data, *words[:-2], "stretched.json", "--json")
    assert ran.returncode == 0 and "tokens that" not in ran.stderr
    assert '"max_positions": 16384' in ran.stdout and '"num_over": 0' in ran.stdout
    unnamed = run(data, name, "lengths.npy", *options, *(("--gpus", "8") if name == "tune" else ("--force",)), "--json")
    assert unnamed.returncode == 0, unnamed.stderr
    assert '"positions": null' in unnamed.stdout and "tokens that" not in unnamed.stderr


def recurrent(folder: Path) -> Path:
    """The config of a small model whose layers keep states, but for one in four."""
    config = copy.deepcopy(QWEN3_NEXT) | {"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 300}
    (folder / "recurrent.json").write_text(json.dumps(config))
    return folder / "recurrent.json"


def test_ranks_share_no_sequences_of_a_model_that_keeps_a_state_unless_they_are_to(data: Path) -> None:
    words = ("--chunk-size", "512", "--k", "1", "--dp", "2", "--model", str(recurrent(data)))
    _, messages = built(data, *words)
    assert "ranks share no sequences: layers of qwen3_next 0.4B keep a state" in " ".join(messages.split())
    assert "plan only" not in messages
    manifest = json.loads(next(data.rglob("plan/manifest.json")).read_text())
    assert "cp" not in manifest["config"]  # off
    _, messages = built(data, *words, "--cp", "auto")
    assert "plan only: the runtime cannot run shared sequences of a recurrent model yet" in " ".join(messages.split())


def test_the_memory_of_layers_that_differ_is_found_in_the_plan_too(data: Path) -> None:
    """States and keys, of one stage and of two."""
    for pp in ("2", "1"):
        words = ("--chunk-size", "512", "--k", "1", "--pp", pp, "--model", str(recurrent(data)))
        document, _ = built(data, *words)
        assert document["memory"] == json.loads(run(data, "inspect", "--json").stdout)["memory"]
    assert document["memory"]["memory"]["kv"] > document["memory"]["memory"]["kv_gradients"] > 0


def test_a_mix_is_shown_as_the_shares_that_result(command, tmp_path: Path) -> None:
    for name, number in (("a", 6), ("b", 3), ("c", 3)):
        lines = [json.dumps({"text": f"{name} {each} " + "word " * each}) for each in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert (
        command("analyze", "a.jsonl", "b.jsonl", "c.jsonl", "--tokenizer", ROOT / "sample_data" / "tokenizer").code == 0
    )
    small = ("build", "--chunk-size", 64, "--k", 1, "--global-batch", 2, "--checkpointing", "none", "--dry-run")
    ran = command(*small, "--mix", "a.jsonl=25%", "--mix", "b.jsonl=75%")
    rows = [line.split() for line in ran.out.splitlines() if ".jsonl" in line and "%" in line]
    assert [[row[0], row[1], *row[3:]] for row in rows] == [
        ["a.jsonl", "22.2%", "2", "6", "skips", "4"],
        ["b.jsonl", "77.8%", "7", "3", "repeats", "3"],
        ["c.jsonl", "0.0%", "0", "3", "skips", "all"],
    ]
    assert "not its share" not in ran.err
    ran = command(*small, "--mix", "a.jsonl=0.7", "--mix", "b.jsonl=0.2", "--mix", "c.jsonl=0.1", width=200)
    assert "these numbers are how often an epoch takes each source, not its share" in ran.err
    assert "write --mix a.jsonl=70% --mix b.jsonl=20% --mix c.jsonl=10%" in ran.err
    ran = command(*small, "--mix", "d.jsonl=70%")
    assert (ran.code, ran.err.splitlines()[-2:]) == (
        2,
        ["error: the analysis has no source d.jsonl", "hint: its sources are a.jsonl, b.jsonl, c.jsonl"],
    )
