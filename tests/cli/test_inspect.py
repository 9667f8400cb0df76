"""`chunkplan inspect` on plans: screens that fit, chunks down to the text of their tokens, mistakes explained."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.token_text import TextPiece
from tests.support.places import ROOT

SAMPLE = ROOT / "sample_data"
TOKENIZER = SAMPLE / "tokenizer"

#: What a terminal, rich or a reader could be fooled by.
HOSTILE = "a\x1b[31mred\x07\r\x9b2J [bold]tag[/bold] \u202eback ⟦not a mark⟧ \u200b\x7f end"
PROMPT, ANSWER = "What is the sum of one and two?", " Three, and no more than that."
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 30,
    "日本語のテキスト、そして絵文字 🙂🚀 と каждый символ. " * 20,
    HOSTILE,
    *(f"A short text, the number {number} of a few. " * (number % 4 + 1) for number in range(12)),
]
RECORDS = [*({"text": text} for text in TEXTS)]

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with an analysis of texts and of a prompt, and a plan of it on two ranks and two stages."""
    folder = tmp_path_factory.mktemp("made")
    texts, pairs = folder / "texts.jsonl", folder / "pairs.jsonl"
    texts.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    pairs.write_text(json.dumps({"prompt": PROMPT, "completion": ANSWER}) + "\n", encoding="utf-8")
    workspace = folder / "workspace"
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    chunkplan.analyze([texts, pairs], workspace / "analysis", tokenizer=folder / "tokenizer", workers=1)
    config = chunkplan.PlanConfig(chunk_size=128, k=1, dp=2, pp=2, global_batch=8)
    chunkplan.build(workspace / "analysis", workspace / "plan", config, workers=1)
    return workspace


@pytest.fixture(scope="module")
def plan(made: Path) -> Plan:
    return chunkplan.load_plan(made / "plan")


def places(plan: Plan) -> list[tuple[int, int, int]]:
    """(step, rank, chunk) of all chunks."""
    return [
        (step.step, rank, chunk.chunk_id)
        for step in plan.iter_steps()
        for rank in step.chunks
        for chunk in step.chunks[rank]
    ]


def chunk_with(plan: Plan, sequence_id: int, part: int = 0) -> tuple[str, ...]:
    """The options that show the `part`th chunk that has some of a sequence."""
    found = [
        (step.step, rank, chunk.chunk_id)
        for step in plan.iter_steps()
        for rank, chunks in step.chunks.items()
        for chunk in chunks
        if any(segment.sequence_id == sequence_id for segment in chunk.segments)
    ]
    return tuple(
        word
        for name, value in zip(("--step", "--rank", "--chunk"), found[part], strict=True)
        for word in (name, str(value))
    )


@pytest.mark.parametrize("width", [80, 120])
def test_screens_fit_and_are_readable_without_colour(command: Command, made: Path, plan: Plan, width: int) -> None:
    for words in ((), ("--step", 0), chunk_with(plan, 0), (*chunk_with(plan, 1), "--text"), (made / "analysis",)):
        ran = command("inspect", "--workspace", made, *words, width=width)
        assert (ran.code, ran.err) == (0, "")
        assert "\x1b" not in ran.out
        assert max(cells(line) for line in ran.out.splitlines()) <= width


def cells(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)


def test_json_of_a_plan_is_its_report(command: Command, made: Path) -> None:
    document = json.loads(command("inspect", "--workspace", made, "--json").out)
    report = chunkplan.plan_report(made / "plan").to_dict()
    assert {name: document[name] for name in report} == json.loads(json.dumps(report))
    assert document["manifest"]["kind"] == "plan"


def test_a_rank_of_a_step_is_shown_alone(command: Command, made: Path) -> None:
    both, one = (command("inspect", "--workspace", made, "--step", 1, *more).out for more in ((), ("--rank", 1)))
    assert "rank 0" in both and "rank 1" in both
    assert "rank 0" not in one and "rank 1" in one
    document = json.loads(command("inspect", "--workspace", made, "--step", 1, "--rank", 1, "--json").out)
    assert {chunk["dp_rank"] for chunk in document["chunks"]} == {1}
    assert {(row["dp_rank"], row["stage"]) for row in document["schedule"]} == {(1, 0), (1, 1)}


def test_a_chunk_names_the_line_that_each_segment_is_from(command: Command, made: Path, plan: Plan) -> None:
    for step, rank, chunk in places(plan):
        words = ("--step", step, "--rank", rank, "--chunk", chunk, "--text", "--json")
        document = json.loads(command("inspect", made / "plan", *words).out)
        assert sum(segment["num_target_tokens"] for segment in document["segments"]) == document["num_target_tokens"]
        assert {action["op"] for action in document["actions"]} >= {"backward"}
        for segment in document["segments"]:
            path, line = segment["place"].rsplit(":", 1)
            record = json.loads(Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1])
            text = "".join(piece["text"] for piece in segment["text"]["first"])
            original = record.get("text") or record["prompt"] + record["completion"]
            assert text.replace("\ufffd", "").replace("<|im_end|>", "") in original or "\ufffd" in text
            assert sum(piece["num_tokens"] for piece in segment["text"]["first"]) == segment["end"] - segment["start"]


def test_parts_of_a_split_sequence_read_as_the_whole(plan: Plan, made: Path) -> None:
    """And the first token of all is the only one that is no target; a border through a character breaks no more."""
    analysis = chunkplan.load_analysis(made / "analysis")
    tokenizer = chunkplan.open_tokenizer(analysis)
    read: dict[int, list[tuple[int, tuple[TextPiece, ...]]]] = {}
    for step, rank, chunk in places(plan):
        view = chunkplan.view_chunk(plan, step, chunk, dp_rank=rank, analysis=analysis, tokenizer=tokenizer)
        for segment in view.segments:
            read.setdefault(segment.sequence_id, []).append((segment.start, segment.text.first if segment.text else ()))
    for sequence_id in (0, *range(2, len(TEXTS))):
        pieces = [piece for _, pieces in sorted(read[sequence_id]) for piece in pieces]
        assert "".join(piece.text for piece in pieces) == TEXTS[sequence_id]
        assert [piece.num_tokens for piece in pieces if not piece.is_target] == [1]
    assert len(read[0]) > 1, "the first is split"
    assert len(read[1]) > 1, "and the second, inside characters or not"
    cut = "".join(piece.text for _, pieces in sorted(read[1]) for piece in pieces)
    assert len(cut.replace("\ufffd", "")) >= len(TEXTS[1]) - 2 * len(read[1])


def test_of_a_long_chunk_both_ends_are_shown_and_json_has_all(
    command: Command, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of each segment, up to 800 tokens."""
    numbers = [" ".join(map(str, range(start, start + 1500))) for start in (0, 20_000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in numbers)
    (tmp_path / "data.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = ROOT / "sample_data" / "tokenizer"
    analysis = chunkplan.analyze(tmp_path / "data.jsonl", tmp_path / "analysis", tokenizer=tokenizer, workers=1)
    config = chunkplan.PlanConfig(chunk_size=32_768, k=1)
    plan = chunkplan.build(analysis, tmp_path / "plan", config, workers=1)
    where = ("inspect", plan.path, "--step", 0, "--chunk", 0, "--text")
    document = json.loads(command(*where, "--json").out)
    shown = command(*where, width=120).out
    assert len(document["segments"]) == 2
    for segment in document["segments"]:
        assert (segment["text"]["num_left_out"], segment["text"]["last"]) == (0, [])
        left_out = segment["end"] - segment["start"] - 800
        assert f"... {left_out:,} tokens left out here, {left_out:,} targets among them; --json shows all ..." in shown
        text = "".join(piece["text"] for piece in segment["text"]["first"])
        assert text.removesuffix("<|im_end|>").strip() in numbers
        assert text[-30:].removesuffix("<|im_end|>").strip()[-12:] in shown.replace("\n", "")
    view = chunkplan.view_chunk(
        plan, 0, 0, analysis=analysis, tokenizer=chunkplan.open_tokenizer(analysis), most_tokens=10
    )
    kept = [each.end - each.start - each.text.num_left_out for each in view.segments if each.text is not None]
    assert kept == [10, 10]


@pytest.mark.parametrize("colour", [False, True])
def test_targets_are_marked_with_colour_and_without(command: Command, made: Path, plan: Plan, colour: bool) -> None:
    pair = len(TEXTS)
    shown = command("inspect", made / "plan", *chunk_with(plan, pair), "--text", colour=colour).out
    assert ("\x1b[32m" in shown) == colour
    plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", shown).split())
    assert f"{PROMPT}⟦{ANSWER}<|im_end|>⟧" in plain
    assert plain.count("⟦") == plain.count("⟧")


@pytest.mark.parametrize("colour", [False, True])
def test_text_cannot_reach_the_terminal(command: Command, made: Path, plan: Plan, colour: bool) -> None:
    shown = command("inspect", made / "plan", *chunk_with(plan, 2), "--text", colour=colour).out
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown) if colour else shown
    assert not set(shown) & set("\x1b\x07\r\x9b\u202e\u200b\x7f")
    for escaped in ("␛[31mred␇␍\\x9b2J", "[bold]tag[/bold]", "\\u202eback", "\\u27e6not a mark\\u27e7", "\\u200b␡ end"):
        assert escaped in " ".join(shown.split())
    assert shown.count("⟦") == shown.count("⟧")


def test_a_chunk_is_shown_without_its_analysis(command: Command, made: Path, plan: Plan, tmp_path: Path) -> None:
    shutil.copytree(made / "plan", tmp_path / "plan")
    ran = command("inspect", "plan", *chunk_with(plan, 0))
    assert ran.code == 0
    assert "say where it is with --analysis" in " ".join(ran.err.split())
    assert "?" in ran.out
    moved = command("inspect", "plan", *chunk_with(plan, 0), "--analysis", made / "analysis")
    assert "texts.jsonl:1" in "".join(moved.out.split())
    assert moved.err == ""


def test_a_tokenizer_that_moved_or_changed_is_named(command: Command, made: Path, plan: Plan) -> None:
    words = ("inspect", made / "plan", *chunk_with(plan, 3), "--text")
    kept, moved = made.parent / "tokenizer", made.parent / "moved"
    right = command(*words).out
    kept.rename(moved)
    try:
        gone = command(*words)
        assert (gone.code, gone.out) == (2, "")
        assert "is not a path here" in gone.err and "--tokenizer" in gone.err
        again = command(*words, "--tokenizer", moved)
        assert (again.out, again.err) == (right, "")
        shutil.copytree(moved, kept)
        written = json.loads((kept / "tokenizer.json").read_text())
        (kept / "tokenizer.json").write_text(json.dumps(written, indent=1))
        assert command(*words).out == right  # it is written otherwise, and encodes the same
        written["model"]["merges"].reverse()
        (kept / "tokenizer.json").write_text(json.dumps(written))
        changed = command(*words)
        assert changed.code == 3
        assert "not the tokenizer that the analysis was made with" in changed.err
        forced = command(*words, "--tokenizer", kept)
        assert forced.out == right
        assert "the tokens are of another tokenizer" in forced.err
    finally:
        shutil.rmtree(kept, ignore_errors=True)
        moved.rename(kept)


@pytest.mark.parametrize("output", ["work/chunkplan-out/analysis", "elsewhere/analysis"])
def test_a_tokenizer_is_found_from_another_folder_than_its_relative_path_is_for(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str
) -> None:
    """Also where the other folder has another tokenizer of that name."""
    (tmp_path / "work").mkdir()
    shutil.copytree(TOKENIZER, tmp_path / "work" / "tokens")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "A fox, and a dog."}) + "\n")
    monkeypatch.chdir(tmp_path / "work")
    assert command("analyze", "../texts.jsonl", "--tokenizer", "tokens", "--output", tmp_path / output).code == 0
    command(
        "build", tmp_path / output, "--chunk-size", 64, "--k", 1, "--global-batch", 1, "--output", tmp_path / "plan"
    )
    words = ("inspect", tmp_path / "plan", "--step", 0, "--chunk", 0, "--text")
    right = command(*words)
    assert "fox" in right.out, right.err
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert (command(*words).out, command(*words).err) == (right.out, "")
    shutil.copytree(TOKENIZER, tmp_path / "other" / "tokens")
    with (tmp_path / "other" / "tokens" / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert (command(*words).out, command(*words).err) == (right.out, "")


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "unknown step": (("--step", 9), "the plan has steps 0 to 1"),
    "step below 0": (("--step", -1), "the plan has steps 0 to 1"),
    "unknown rank": (("--step", 0, "--rank", 2), "the plan has ranks 0 to 1"),
    "unknown chunk": (("--step", 0, "--rank", 1, "--chunk", 99), "it has chunks 0 to "),
    "chunk without a rank": (("--step", 0, "--chunk", 1), "--chunk needs --rank"),
    "rank without a step": (("--rank", 1), "--rank needs --step"),
    "chunk without a step": (("--chunk", 1), "--chunk needs --step"),
    "text without a chunk": (("--step", 0, "--text"), "--text needs --chunk"),
    "tokenizer without text": (
        ("--step", 0, "--rank", 0, "--chunk", 0, "--tokenizer", "x"),
        "--tokenizer needs --text",
    ),
    "analysis without a chunk": (("--step", 0, "--analysis", "x"), "--analysis needs --chunk"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_to_do(command: Command, made: Path, mistake: str) -> None:
    words, said = MISTAKES[mistake]
    ran = command("inspect", made / "plan", *words)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "hint: " in ran.err


def test_options_of_plans_are_refused_for_an_analysis(command: Command, made: Path) -> None:
    for option in ("--step", "--rank", "--chunk", "--analysis", "--tokenizer"):
        ran = command("inspect", made / "analysis", option, 0)
        assert ran.code == 2 and f"{option} is for plans" in ran.err


def test_text_needs_tokens(command: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    command("build", "lengths.npy", "--chunk-size", 128, "--k", 1)
    ran = command("inspect", "--step", 0, "--chunk", 1, "--text")
    assert ran.code == 2
    assert "holds lengths only" in ran.err
    shown = command("inspect", "--step", 0, "--chunk", 1, "--json")
    [segment] = json.loads(shown.out)["segments"]
    assert (segment["part"], segment["num_target_tokens"], segment["place"][-18:]) == (
        [0, 3],
        128,
        "lengths.npy, row 0",
    )


def test_another_analysis_is_refused(command: Command, made: Path, plan: Plan, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    ran = command("inspect", made / "plan", *chunk_with(plan, 0), "--analysis", "lengths.npy")
    assert ran.code == 3
    assert "not the analysis of the plan" in ran.err
