"""`chunkplan analyze` and `chunkplan merge` from their options to what is on the screen and in the files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from chunkplan.config.intake import IntakeOptions
from chunkplan.intake.reading import IntakeRequest
from chunkplan.lengths import length_report
from chunkplan.planfile.load import load_analysis
from chunkplan_cli import progress
from tests.support.analyze_cases import TOKENIZER, analyzed, write
from tests.support.command_line import Run


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` in a folder with `dataset.jsonl` in it."""
    write("dataset.jsonl", *({"text": "word " * 3**power} for power in range(10)))
    return command


def test_the_tokenizer_of_the_workspace_is_used(run: Run) -> None:
    Path("ws").mkdir()
    Path("ws/workspace.toml").write_text(f"tokenizer = {json.dumps(str(TOKENIZER))}\n")
    assert "ESTIMATED" not in run("analyze", "dataset.jsonl", "--workspace", "ws").out


def test_a_second_run_says_what_it_replaced(run: Run) -> None:
    first = run("analyze", "dataset.jsonl", "--output", "there").err
    assert "replaced" not in first
    assert "next: chunkplan gain there --gpus 8\n" in first
    second = run("analyze", "dataset.jsonl", "--output", "there").err
    assert "analysis in there (replaced the analysis of dataset.jsonl, 10 sequences)" in second
    Path("there/manifest.json").write_text('{"kind": "analysis", "schem')
    assert "replaced something that is no analysis" in run("analyze", "dataset.jsonl", "--output", "there").err


def test_json_is_one_document_with_the_report_and_all_of_the_manifest_about_what_was_read(run: Run) -> None:
    write("bad.jsonl", {"text": "fine"}, {"text": ""})
    ran = run("analyze", "dataset.jsonl", "bad.jsonl", "--tokenizer", TOKENIZER, "--on-error", "skip", "--json")
    document = json.loads(ran.out)
    analysis = load_analysis(Path("chunkplan-out/analysis"))
    assert document.pop("analysis") == "chunkplan-out/analysis"
    assert document.pop("report") == json.loads(json.dumps(length_report(analysis).to_dict()))
    assert document == {name: analysis.manifest[name] for name in document}
    told = {"kind", "schema_version", "tool_version", "content_hashes", "totals", "max_token_id", "tokens"}
    assert analysis.manifest.keys() - document.keys() == told
    assert document["rejected"] == {"empty": 1}
    assert document["options"]["on_error"] == "skip"
    assert "2 records, 1 rejected" in ran.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--format", "text"), {"schema": "text"}),
        (("--format", "dataset.jsonl=text"), {"formats": {"dataset.jsonl": "text"}}),
        (("--column", "text=body", "--column", "length=n"), {"columns": {"text": "body", "length": "n"}}),
        (("--length-column", "n"), {"columns": {"length": "n"}}),
        (("--ignore-column", "n", "--ignore-column", "a.jsonl:m"), {"ignore_columns": ("n", "a.jsonl:m")}),
        (("--train-turns", "each"), {"turns": "each"}),
        (("--max-length", "7", "--overlong", "drop"), {"max_length": 7, "long": "drop"}),
        (("--on-error", "skip"), {"on_error": "skip"}),
        (("--kto-negatives", "drop"), {"undesirable": "drop"}),
        (("--no-tokens",), {"tokens": False}),
        (("--sample", "0.25"), {"sample": 0.25}),
        (("--max-record-mb", "0.5"), {"max_record_bytes": 500_000}),
        (("--template-kwargs", "thinking=false"), {"chat_template_kwargs": {"thinking": False}}),
        (("--text-split", "line"), {"text_split": "line"}),
        (("--text-end", "eos"), {"text_end": "eos"}),
        ((), {}),
    ],
)
def test_every_option_of_the_intake_is_one_of_the_command_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: dict[str, Any]
) -> None:
    """...and without any, they are those of Python."""
    asked: list[IntakeOptions] = []

    def note_options(request: IntakeRequest, output: object) -> None:
        asked.append(request.options)
        raise SystemExit(0)

    monkeypatch.setattr("chunkplan.intake.reading.write_analysis", note_options)
    run("analyze", "dataset.jsonl", *options)
    assert asked == [IntakeOptions(**expected)]
    named = {"schema", "formats", "columns", "ignore_columns", "turns", "max_length", "long", "on_error", "undesirable"}
    named |= {"tokens", "sample", "max_record_bytes", "chat_template_kwargs", "text_split", "text_end"}
    assert {field.name for field in fields(IntakeOptions)} == named


def test_records_are_read_as_the_user_says(run: Run) -> None:
    write("odd.jsonl", {"body": "one two " * 5, "n": 7, "text": "t t"}, {"body": "three " * 9, "n": 9, "text": "t t"})
    by_text = analyzed(run, "odd.jsonl").num_tokens
    assert (analyzed(run, "odd.jsonl", "--column", "text=body").num_tokens > by_text).all()
    assert list(analyzed(run, "odd.jsonl", "--length-column", "n").num_tokens) == [7, 9]
    assert analyzed(run, "odd.jsonl", "--format", "text").manifest["sources"][0]["evidence"].startswith("--format text")
    write("chat.jsonl", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]})
    Path("plain.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    by_template = analyzed(run, "chat.jsonl", "--chat-template", "plain.jinja").num_tokens
    assert by_template < analyzed(run, "chat.jsonl").num_tokens


def test_what_is_too_long_is_cut_dropped_or_an_error_and_counted(run: Run) -> None:
    everything = analyzed(run, "dataset.jsonl")
    num_long = int((everything.num_tokens > 100).sum())
    assert 0 < num_long < everything.num_sequences
    ran = run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER, "--max-length", 100, "--overlong", "drop")
    assert f"{num_long} rejected: too-long" in ran.out
    assert f"10 records = {10 - num_long} sequences + {num_long} rejected\n" in ran.err
    ran = run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER, "--max-length", 100, "--overlong", "error")
    assert ran.code == 3
    [(found, cut)] = re.findall(r"jsonl:6: (\d+) tokens, more than 100\nhint: .* truncate cuts (\d+) tokens", ran.err)
    assert int(found) - int(cut) == 100


@pytest.mark.parametrize(
    ("records", "options", "hint"),
    [
        (
            [("good", None), ("good", False), ("good", True)],
            (),
            "--kto-negatives keep keeps all labels for a loss such as kto, "
            "--kto-negatives drop leaves such records out, counted; remove `label` if it means another thing; "
            "--on-error skip counts such records and goes on (1 of the 3 read here)",
        ),
        ([("bad", False)] * 2, (), "give records with good answers too, or remove `label` if it means another thing"),
        ([(3, None)] * 2, ("--format", "prompt+completion"), "fix this record, or leave it out"),
        (
            [("too long", None)],
            ("--max-length", 2, "--overlong", "error"),
            "raise --max-length, or say --overlong truncate",
        ),
    ],
)
def test_a_hint_says_how_much_it_leaves_out_and_never_all(
    run: Run, records: list[tuple[Any, Any]], options: tuple[Any, ...], hint: str
) -> None:
    write("x.jsonl", *({"prompt": "a", "completion": text, "label": label} for text, label in records))
    ran = run("analyze", "x.jsonl", "--tokenizer", TOKENIZER, *options)
    assert (ran.code, ran.err.partition("\nhint: ")[2]) == (3, f"{hint}\n")


def test_where_others_can_be_read_a_source_of_nothing_else_may_be_left_out(run: Run) -> None:
    write("x.jsonl", {"prompt": "a", "completion": "b", "label": False})
    said = ("analyze", "dataset.jsonl", "x.jsonl", "--tokenizer", TOKENIZER)
    ran = run(*said)
    assert (ran.code, ran.err.endswith("; --on-error skip leaves this source out and goes on\n")) == (3, True)
    assert run(*said, "--on-error", "skip").code == 0


def test_bad_records_stop_the_run_at_their_line_or_are_counted_and_listed(run: Run) -> None:
    write("bad.jsonl", {"text": "fine"}, {"text": " "}, "[1]", {"text": 3}, "{", {"text": "also fine"})
    stopped = run("analyze", "bad.jsonl", "--tokenizer", TOKENIZER)
    assert stopped.code == 3
    assert stopped.err == (
        "error: bad.jsonl:3: found a list, expected one JSON object a line\n"
        "hint: JSONL has one JSON object a line; arrays, and objects over several lines, are read from files named "
        ".json; --on-error skip counts such records and goes on (3 of the 6 read here)\n"
    )
    assert not Path("chunkplan-out/analysis").exists()
    ran = run("analyze", "bad.jsonl", "--tokenizer", TOKENIZER, "--on-error", "skip")
    assert ran.code == 0
    assert "4 rejected: 1 empty, 1 not-an-object, 1 not-json, 1 schema" in " ".join(ran.out.split())
    assert "6 records = 2 sequences + 4 rejected\n" in ran.err
    assert "rejected records are listed in chunkplan-out/analysis/rejected.jsonl\n" in ran.err
    listed = [json.loads(line) for line in Path("chunkplan-out/analysis/rejected.jsonl").read_text().splitlines()]
    assert [(one["file"], one["line"], one["reason"]) for one in listed] == [
        ("bad.jsonl", 2, "empty"),
        ("bad.jsonl", 3, "not-an-object"),
        ("bad.jsonl", 4, "schema"),
        ("bad.jsonl", 5, "not-json"),
    ]


def test_lengths_alone_are_enough_to_plan_and_nothing_is_said_of_targets(run: Run) -> None:
    ran = run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER, "--no-tokens")
    assert "warning: lengths only, no tokens are stored: enough to plan but not to train" in ran.err
    assert "target tokens" not in ran.out
    assert not load_analysis(Path("chunkplan-out/analysis")).has_tokens
    assert run("build", "--chunk-size", 512, "--k", 2).code == 0
    assert "target tokens" in run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER).out


def test_shards_are_merged_into_what_one_machine_makes(run: Run) -> None:
    """With the command that the hint names, as a shell expands it."""
    write("more.jsonl", *({"text": f"number {number}"} for number in range(30)))
    data = ("dataset.jsonl", "more.jsonl", "--tokenizer", TOKENIZER)
    whole = analyzed(run, *data[:2])
    for index in (1, 2, 3):
        ran = run("analyze", *data, "--shard", f"{index}/3", "--workspace", "my ws")
        assert (ran.code, ran.out) == (0, "")
        assert f"shard {index} of 3 in my ws/shard-{index}-of-3\n" in ran.err
    [hint] = re.findall(r"^next, once all 3 are done: chunkplan (merge .*)$", ran.err, re.M)
    expanded = subprocess.run(["bash", "-c", f"printf '%s\\n' {hint}"], capture_output=True, text=True, check=True)
    merged = run(*expanded.stdout.splitlines())
    assert merged.code == 0, merged.err
    assert "read more.jsonl: text, 30 records" in merged.err
    assert "analysis in my ws/analysis\n" in merged.err
    assert load_analysis(Path("my ws/analysis")).content_hash == whole.content_hash
    assert merged.out == run("inspect", "my ws/analysis").out
    document = json.loads(run("merge", *expanded.stdout.splitlines()[1:], "--json").out)
    assert document["content_hash"] == whole.content_hash
    missing = run("merge", "my ws/shard-1-of-3", "my ws/shard-3-of-3", "--workspace", "my ws")
    assert missing.code == 2
    assert "shard 2 of 3 is missing" in missing.err


def test_the_standard_input_is_read_as_lines(tmp_path: Path) -> None:
    lines = '{"text": "one"}\n{"text": 2}\n{"text": "two"}\n'
    command = [sys.executable, "-m", "chunkplan_cli.main", "analyze", "-", "--tokenizer", str(TOKENIZER)]
    ran = subprocess.run(
        [*command, "--on-error", "skip"], cwd=tmp_path, input=lines, capture_output=True, text=True, check=True
    )
    assert "read the standard input: text, 3 records, 1 rejected" in ran.stderr
    analysis = load_analysis(tmp_path / "chunkplan-out" / "analysis")
    assert (analysis.num_sequences, list(analysis.record)) == (2, [0, 2])
    failed = subprocess.run(command, cwd=tmp_path, input=lines, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (3, "")
    assert "error: -:2: `text` is a number" in failed.stderr


def test_work_is_done_again_only_where_it_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = analyzed(run, "dataset.jsonl")
    monkeypatch.setattr("chunkplan.intake.process.read", None)  # what is not in the cache fails
    assert analyzed(run, "dataset.jsonl", "--workers", 1).content_hash == first.content_hash
    with pytest.raises(AssertionError, match="Traceback"):
        run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER, "--no-cache")


def test_progress_is_lines_where_there_is_no_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reading: " not in run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER).err
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    ran = run("analyze", "dataset.jsonl", "--tokenizer", TOKENIZER, "--no-cache")
    lines = re.findall(r"^reading: .*$", ran.err, re.M)
    assert lines
    for line in lines:
        assert re.fullmatch(r"reading: \d+ of \d+ MB \(\d+%\), [\d.,]+[KMG]? tokens/s", line)
    assert "(100%)" in lines[-1]
    assert ran.out == run("inspect", "chunkplan-out/analysis").out
