"""`chunkplan analyze --config FILE.toml` says what the command line does, which wins; and formats of single sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkplan import IntakeOptions
from tests.support.analyze_cases import TOKENIZER, analyzed, write
from tests.support.command_line import Run
from tests.support.intake_checks import chat, question_and_answer


@pytest.fixture
def run(command: Run) -> Run:
    """Run `chunkplan ARGUMENTS` in a folder with `data/humaneval.jsonl` and `data/qa.jsonl`."""
    Path("data").mkdir()
    write("data/humaneval.jsonl", *[{"prompt": "def f", "canonical_solution": "  pass"}] * 3)
    write("data/qa.jsonl", *[{"prompt": "is it?", "answer": "yes it is"}] * 3)
    return command


def _columns(run: Run, *arguments: object) -> list[str]:
    return [source["columns"]["completion"] for source in analyzed(run, "data", *arguments).manifest["sources"]]


FILE = """
max-length = "8K"
on-error = "skip"
[columns]
completion = "answer"
[columns."humaneval.jsonl"]
completion = "canonical_solution"
"""


def test_a_table_for_each_source_is_what_the_command_line_says_of_it(run: Run) -> None:
    Path("a_b.toml").write_text(FILE)
    of_file = analyzed(run, "data", "--config", "a_b.toml")
    assert of_file.options == IntakeOptions(
        max_length=8192,
        on_error="skip",
        columns={"completion": "answer", "humaneval.jsonl:completion": "canonical_solution"},
    )
    columns = ("--column", "completion=answer", "--column", "humaneval.jsonl:completion=canonical_solution")
    typed = analyzed(run, "data", *columns, "--max-length", "8192", "--on-error", "skip")
    assert typed.manifest == of_file.manifest


def test_the_command_line_wins_entry_by_entry_and_the_screen_says_so(run: Run) -> None:
    Path("a_b.toml").write_text(FILE)
    assert _columns(run, "--config", "a_b.toml") == ["canonical_solution", "answer"]
    given = ("--config", "a_b.toml", "--max-length", "4K", "--column", "humaneval.jsonl:completion=prompt")
    assert _columns(run, *given) == ["prompt", "answer"]
    ran = run("analyze", "data", *given)
    assert ran.err.startswith(
        "options from a_b.toml: on-error, columns; given in place of what it says: max-length, "
        "columns: humaneval.jsonl:completion\n"
    )
    Path("length.toml").write_text('length-column = "n"')
    write("n.jsonl", {"n": 5, "m": 6})
    for typed in (("--length-column", "m"), ("--column", "length=m")):
        assert analyzed(run, "n.jsonl", "--config", "length.toml", *typed).num_tokens.tolist() == [6]
    assert analyzed(run, "n.jsonl", "--config", "length.toml").num_tokens.tolist() == [5]


def test_options_of_the_work_are_in_the_file_as_well(run: Run) -> None:
    Path("a.toml").write_text('shard = "1/2"\nuse-cache = false\nworkers = 1\ntokens = false\n' + FILE)
    ran = run("analyze", "data", "--config", "a.toml")
    assert ran.code == 0, ran.err
    assert Path("chunkplan-out/shard-1-of-2").is_dir()


@pytest.mark.parametrize(
    ("text", "code", "message", "hint"),
    [
        ("train-turns = ", 2, "a.toml: not TOML", "lines such as"),
        ('format = "text"', 2, "a.toml: unknown entry `format`", "what --format says is schema or formats in a file"),
        ("max-record-mb = 4", 2, "a.toml: unknown entry `max-record-mb`", "is max-record-bytes in a file"),
        ('colums = "x"', 2, "a.toml: unknown entry `colums`", "is columns meant? "),
        ("train-turns = 3", 2, "a.toml: `train-turns` is 3, expected rendered or last or each", "fix this entry"),
        ('schema = "txt"', 2, 'a.toml: `schema` is "txt", expected one of text, messages', "fix this entry"),
        ('max-length = "8Q"', 2, 'a.toml: `max-length` is "8Q", expected a number of tokens from 1, such as', "fix"),
        ("max-length = true", 2, "a.toml: `max-length` is true, expected a number of tokens from 1, such as", "fix"),
        ('columns = "x=y"', 2, 'a.toml: `columns` is "x=y", expected keys by role, or by source and role', "fix"),
        ("[columns.a]\ntext = 1", 2, "a.toml: `columns.a.text` is 1, expected keys by role", "fix"),
        ('[columns.a]\n"b:text" = "c"', 2, 'a.toml: `columns.a."b:text"` is "c", expected keys', "fix"),
        ('[columns]\n"a:text" = "b"\na = {text = "c"}', 2, 'a.toml: `columns` is {"a:text": "b", ', "fix"),
        ('[columns.no]\ntext = "b"', 2, "a.toml: columns.no.text: no source is no; there are data/", "is named by"),
        ('[formats]\n"n o" = "jsonl"', 2, 'a.toml: formats."n o": no source is n o; there are data/', "is named by"),
        ('[formats]\nno = "foo"', 2, "a.toml: formats.no: there is no such schema, and no such kind", "one of"),
        ('[columns.data]\nwords = "b"', 2, "a.toml: columns.data.words: no source is data", "is named by"),
        (
            '[columns."qa.jsonl"]\nwords = "b"',
            2,
            'a.toml: columns."qa.jsonl".words: no schema has such a role',
            "roles",
        ),
        ('[columns]\nwords = "b"', 2, "a.toml: columns.words: no schema has such a role", "roles are"),
        (
            '[columns."*.jsonl"]\nprompt = "a"\n[columns."qa.jsonl"]\nprompt = "b"',
            *(2, 'a.toml: columns."*.jsonl".prompt and a.toml: columns."qa.jsonl".prompt are both for data/qa.jsonl'),
            "leave one",
        ),
        ('overlong = "drop"', 2, "--overlong drop without a maximum length", "--max-length"),
    ],
)
def test_a_mistake_in_the_file_is_one_as_on_the_command_line(
    run: Run, text: str, code: int, message: str, hint: str
) -> None:
    Path("a.toml").write_text(text)
    ran = run("analyze", "data", "--config", "a.toml")
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert f"error: {message}" in ran.err
    assert hint in ran.err.partition("\nhint: ")[2]


def test_a_key_of_the_file_that_no_record_has_is_named_as_it_stands_there(run: Run) -> None:
    Path("a.toml").write_text('[columns."qa.jsonl"]\ncompletion = "reply"\n')
    ran = run("analyze", "data/qa.jsonl", "--config", "a.toml")
    assert ran.code == 3
    assert 'no record has the key `reply` of a.toml: columns."qa.jsonl".completion; found: `prompt` in' in ran.err
    assert ran.err.endswith("hint: is it `answer`?\n")
    assert _columns(run, "--config", "a.toml", "--column", "completion=canonical_solution", *TYPED) == KEYS


TYPED, KEYS = ("--column", "qa.jsonl:completion=answer"), ["canonical_solution", "answer"]

WORKSPACE = """
[columns]
completion = "answer"
[columns."humaneval.jsonl"]
completion = "canonical_solution"
"""


def test_the_file_of_the_workspace_says_how_sources_are_laid_out_as_well(run: Run) -> None:
    """As --config does, which wins over it as what is typed wins over both."""
    Path("chunkplan-out").mkdir()
    Path("chunkplan-out/workspace.toml").write_text(WORKSPACE)
    assert _columns(run) == KEYS
    ran = run("analyze", "data")
    assert ran.err.startswith("options from chunkplan-out/workspace.toml: columns\n")
    Path("a.toml").write_text('max-length = 8\n[columns."humaneval.jsonl"]\ncompletion = "prompt"\n')
    assert _columns(run, "--config", "a.toml") == ["prompt", "answer"]
    typed = ("--column", "humaneval.jsonl:completion=canonical_solution")
    assert _columns(run, "--config", "a.toml", *typed) == KEYS
    ran = run("analyze", "data", "--config", "a.toml", *typed)
    assert ran.err.splitlines()[:2] == [
        "options from a.toml: max-length; given in place of what it says: columns: humaneval.jsonl:completion",
        "options from chunkplan-out/workspace.toml: columns; "
        "given in place of what it says: columns: humaneval.jsonl:completion",
    ]
    Path("chunkplan-out/workspace.toml").write_text('[formats]\n"part.*" = "jsonl,messages"\n')
    write("data/part.0", MESSAGES)
    assert analyzed(run, "data/part.0").manifest["sources"][0]["schema"] == "messages"


@pytest.mark.parametrize("text", ['[columns]\nno = "b"', "columns = 3", "train-turns = 3", "x ="])
def test_a_mistake_in_the_file_of_the_workspace_is_one_as_on_the_command_line(run: Run, text: str) -> None:
    Path("ws").mkdir()
    Path("ws/workspace.toml").write_text(text)
    ran = run("analyze", "data", "--workspace", "ws")
    assert (ran.code, ran.out) == (2, "")
    assert "error: ws/workspace.toml: " in ran.err
    assert "hint: " in ran.err


def test_a_record_of_no_analysis_is_read_as_the_file_of_the_workspace_says(run: Run) -> None:
    """Of what it says of other sources nothing is asked."""
    Path("chunkplan-out").mkdir()
    Path("chunkplan-out/workspace.toml").write_text(WORKSPACE + '[formats]\n"no.log" = "jsonl"\n')
    show = ("inspect", "--tokenizer", TOKENIZER, "--record")
    for file, key in (("humaneval.jsonl", "canonical_solution"), ("qa.jsonl", "answer")):
        ran = run(*show, f"data/{file}:1")
        assert ran.code == 0, ran.err
        assert f"`{key}`" in ran.out
        assert ran.err.startswith("options from chunkplan-out/workspace.toml: columns\n")
    assert "`prompt` and `answer`" in run(*show, "data/qa.jsonl:1", "--column", "question=prompt").out


MESSAGES = chat(*question_and_answer("Hi!", "Hello."))


def test_what_a_file_is_and_how_its_records_are_laid_out_is_said_by_source(run: Run) -> None:
    """In a folder too, where it would lie beside the data; a source of both schemas is read by that of its own."""
    both = {"prompt": "Hi!", "completion": " Hm.", "response": " Hello."}
    write("data/part.0", MESSAGES, MESSAGES)
    write("data/both.jsonl", both)
    Path("data/rows.log").write_text("[{}, {}]".format(*['{"text": "one two"}'] * 2))
    (Path("data") / "humaneval.jsonl").unlink()
    (Path("data") / "qa.jsonl").unlink()
    says = ("part.*=jsonl,messages", "*.log=json", "both.jsonl=question+answer")
    Path("a.toml").write_text(
        '[formats]\n"part.*" = "jsonl,messages"\n"*.log" = "json"\n"both.jsonl" = "question+answer"'
    )
    typed = [word for said in says for word in ("--format", said)]
    for options in (typed, ("--config", "a.toml")):
        analysis = analyzed(run, "data", *options)
        assert [
            (Path(source["path"]).name, source["format"], source["schema"], source["records"])
            for source in analysis.manifest["sources"]
        ] == [
            ("both.jsonl", "jsonl", "question+answer", 1),
            ("part.0", "jsonl", "messages", 2),
            ("rows.log", "json", "text", 2),
        ]
        assert analysis.options is not None
        assert analysis.options.formats == dict(said.split("=") for said in says)
    assert analyzed(run, "data/part.0", "--format", "part.0=jsonl").num_sequences == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data/x.log",), "data/x.log has a suffix that is not known"),
        (("data", "--format", "qa.jsonl"), "--format is 'qa.jsonl', expected one of text, "),
        (("data", "--format", "qa.jsonl=foo"), "--format qa.jsonl=foo: there is no such schema, and no such kind"),
        (("data", "--format", "qa.jsonl=npy.gz"), "--format qa.jsonl=npy.gz: there is no such schema, and no such"),
        (("data", "--format", "qa.jsonl=json,jsonl"), "--format qa.jsonl=json,jsonl says twice what it is"),
        (("data", "--format", "qa.jsonl="), "--format is 'qa.jsonl=', expected NAME or SOURCE=NAME"),
        (("data", "--format", "=json"), "--format is '=json', expected NAME or SOURCE=NAME"),
        (("data", "--format", "text", "--format", "messages"), "two formats for all sources"),
        (("data", "--format", "a=text", "--format", "a=messages"), "two formats of a"),
        (("data", "--format", "qa.jsonl=text", "--format", "*.jsonl=messages"), "are both for data/qa.jsonl"),
        (("data", "--format", "no=text"), "--format no=text: no source is no; there are data/"),
        (("-", "--format", "-=json"), "the standard input is JSON lines"),
    ],
)
def test_a_format_that_makes_no_sense_is_refused(run: Run, arguments: tuple[str, ...], message: str) -> None:
    write("data/x.log", MESSAGES)
    ran = run("analyze", *arguments)
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert message in ran.err
    assert "\nhint: " in ran.err


def test_the_line_to_type_for_a_file_of_an_unknown_suffix_works(run: Run) -> None:
    write("data/x.log", MESSAGES)
    hint = run("analyze", "data/x.log").err.splitlines()[-1]
    assert hint.endswith("its bytes are those of .jsonl: --format x.log=jsonl")
    assert analyzed(run, "data/x.log", "--format", "x.log=jsonl").num_sequences == 1


def test_what_a_file_is_said_to_be_is_part_of_what_is_cached(run: Run) -> None:
    Path("data/x.log").write_text("[1]\n[2]\n")
    as_text = analyzed(run, "data/x.log", "--format", "x.log=txt")
    assert as_text.num_sequences == 1
    ran = run("analyze", "data/x.log", "--format", "x.log=jsonl")
    assert ran.code == 3 and "data/x.log:1: found a list" in ran.err
    assert analyzed(run, "data/x.log", "--format", "x.log=txt").content_hash == as_text.content_hash


def test_entries_of_the_workspace_for_other_sources_are_ignored_with_a_word(run: Run) -> None:
    """Those of --config and of the command line are not; what is ignored is no option of the analysis."""
    Path("chunkplan-out").mkdir()
    Path("chunkplan-out/workspace.toml").write_text(WORKSPACE + '[formats]\n"no.log" = "jsonl"\n')
    ran = run("analyze", "data/qa.jsonl", "--tokenizer", TOKENIZER)
    assert ran.code == 0, ran.err
    assert (
        'ignored, as there is no such source: chunkplan-out/workspace.toml: columns."humaneval.jsonl".completion, '
        'chunkplan-out/workspace.toml: formats."no.log"\n'
    ) in ran.err
    assert analyzed(run, "data/qa.jsonl").options == IntakeOptions(columns={"completion": "answer"})
    Path("chunkplan-out/workspace.toml").write_text(WORKSPACE)
    assert "ignored" not in run("analyze", "data", "--tokenizer", TOKENIZER).err
    Path("a.toml").write_text('[columns."humaneval.jsonl"]\ncompletion = "prompt"\n')
    for said in (("--config", "a.toml"), ("--column", "humaneval.jsonl:completion=prompt")):
        ran = run("analyze", "data/qa.jsonl", *said)
        assert (ran.code, "no source is humaneval.jsonl" in ran.err) == (2, True)


@pytest.mark.parametrize("others", [1, 3])
def test_a_key_that_is_said_of_all_sources_is_to_be_said_of_those_that_have_it(run: Run, others: int) -> None:
    """In a file as on the command line; the others are read as they are then."""
    Path("mixed").mkdir()
    for number in range(others):
        write(f"mixed/m{number}.jsonl", MESSAGES)
    write("mixed/x.jsonl", {"ws": "some words"})
    ran = run("analyze", "mixed", "--tokenizer", TOKENIZER, "--column", "text=ws")
    assert ran.code == 3
    assert "no record has the key `ws` of --column text=ws; found: `messages`" in ran.err
    assert ran.err.endswith("in place of what is said of all, try this: --column x.jsonl:text=ws\n")
    assert len(analyzed(run, "mixed", "--column", "x.jsonl:text=ws").manifest["sources"]) == others + 1
    Path("chunkplan-out/workspace.toml").write_text('[columns]\ntext = "ws"\n')
    ran = run("analyze", "mixed", "--tokenizer", TOKENIZER)
    assert ran.code == 3
    assert ran.err.endswith(
        "in place of chunkplan-out/workspace.toml: columns.text, "
        'write `[columns."x.jsonl"]` and below it `text = "ws"`\n'
    )
    Path("chunkplan-out/workspace.toml").write_text('[columns."x.jsonl"]\ntext = "ws"\n')
    assert len(analyzed(run, "mixed").manifest["sources"]) == others + 1


@pytest.mark.parametrize("text", ['{\n  "text": "some words"\n}\n', '[\n  {"text": "some words"}\n]\n'])
def test_the_line_for_lines_that_are_none_works(run: Run, text: str) -> None:
    Path("my data.jsonl").write_text(text)
    ran = run("analyze", "my data.jsonl")
    assert ran.code == 3
    assert ran.err.partition("hint: ")[2].endswith("try this: --format 'my data.jsonl=json'\n")
    assert analyzed(run, "my data.jsonl", "--format", "my data.jsonl=json").num_sequences == 1
