"""`chunkplan analyze`: reads data, leaves an analysis in the workspace, shows how long the sequences are."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkplan.config.intake import FILES, IntakeOptions, SourceOverrides
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import ModelShape
from chunkplan.domains import FLAG, Domain, path, text, whole
from chunkplan.errors import UsageError
from chunkplan.options import Advanced, Options, option, options_of, read_settings, same, toml_name
from chunkplan_cli.analysis_report import describe_old, print_analysis, print_next, say_what_lies_beside
from chunkplan_cli.declared import OPTIONS, CliValues, JsonOption, WorkspaceOption, output_option, takes
from chunkplan_cli.plan_report import warn_of_positions
from chunkplan_cli.progress import reading_progress
from chunkplan_cli.terminal import note, warn

if TYPE_CHECKING:
    from chunkplan.intake.reading import IntakeRequest
    from chunkplan.workspace import Workspace

_TOKENS, _DATA, _WORK = "Records and tokens", "What is read and what is kept", "How the work is done"

#: Option that leaves out unreadable sources; a command longer than this is not repeated with it.
_SKIP = ("--on-error", "skip")
_LONGEST_COMMAND = 400


def _read_shard(typed: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", typed)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(typed)
    return int(match[1]), int(match[2])


_SHARD = Domain(
    lambda value: isinstance(value, tuple), "I/N", read=_read_shard, metavar="I/N", example="1/8", is_written_too=True
)


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    """Options of tokenizing, and of the processes and machines that do it."""

    tokenizer: str | None = option(
        text("NAME"),
        "A tokenizer.json or its folder, a model on the Hugging Face Hub, or tiktoken:NAME.",
        group=_TOKENS,
        default=None,
        default_words="CHUNKPLAN_TOKENIZER, then `tokenizer` of workspace.toml; without any, lengths are estimated "
        "from bytes",
    )
    eval: tuple[str, ...] = option(
        FILES,
        "Evaluate on this file or folder, not trained on. Repeatable.",
        group=_DATA,
        default=(),
        default_words="files named validation, dev, test or eval beside train",
        flag="--eval",
    )
    model: ModelShape | None = same(
        CostModel,
        "shape",
        help="Warn of sequences too long for this model.",
        group=_TOKENS,
        default=None,
        default_words="",
    )
    chat_template: Path | None = option(
        path("FILE"), "A Jinja chat template in place of the tokenizer's.", group=Advanced(_TOKENS), default=None
    )
    length_column: str | None = option(
        text("KEY"), "Read lengths only, from this key or column.", group=Advanced(_TOKENS), default=None
    )
    workers: int | None = option(
        whole(1), "Processes.", group=Advanced(_WORK), default=None, default_words="one for every core"
    )
    shard: tuple[int, int] | None = option(
        _SHARD, "Read only the I-th of N shares; `chunkplan merge` joins them.", group=Advanced(_WORK), default=None
    )
    ray: str | None = option(
        text("ADDRESS"),
        "Do the work on a Ray cluster; `local` starts one on this machine.",
        group=Advanced(_WORK),
        default=None,
    )
    use_cache: bool = option(
        FLAG,
        "Read everything again, also what has not changed.",
        group=Advanced(_WORK),
        default=True,
        default_words="",
        flag="--no-cache",
    )


@dataclass(frozen=True, kw_only=True)
class FileOptions(Options):
    """The file that options come from beside the command line."""

    config: Path | None = option(
        path("FILE"),
        'A file with these options, such as `train-turns = "last"`; the command line wins.',
        group=Advanced(OPTIONS),
        default=None,
    )


@takes(work=AnalyzeOptions, intake=IntakeOptions, file=FileOptions)
def analyze(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="Files, folders, patterns or URLs; owner/name[:SPLIT] on the Hugging Face Hub; dataset_info.json or "
            "axolotl's YAML; - is JSONL from the standard input.",
        ),
    ],
    *,
    work: CliValues,
    intake: CliValues,
    file: CliValues,
    output: Annotated[
        Path | None, output_option("Where to write. Default: analysis, or shard-I-of-N, of the workspace.")
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the lengths of a dataset and store its tokens for the trainer.

    Reads .jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt and .npy; text also in
    .gz, .zst and .bz2. The layout of the records is detected for each source.

    Unchanged files are not read again, and an interrupted run goes on. With
    `--shard` several machines read the data; `merge` joins what they have read.

    Example: chunkplan analyze train.jsonl --tokenizer Qwen2.5-7B/
    """
    from chunkplan.intake.reading import write_analysis
    from chunkplan.workspace import Workspace, find_tokenizer

    place = Workspace.find(workspace)
    work, intake = with_files(FileOptions(**file).config, place, work, intake)
    how = AnalyzeOptions(**work)
    options = IntakeOptions(**intake)
    how = replace(how, tokenizer=find_tokenizer(how.tokenizer, place))
    beside: list[str] = []
    if how.shard is not None:
        target = output or place.root / f"shard-{how.shard[0]}-of-{how.shard[1]}"
        with reading_of(data, options, how, place, beside) as request:
            _write_shard(request, target, how.shard)
        say_what_lies_beside(beside)
        merge = shlex.join(["chunkplan", "merge", *(["--workspace", str(workspace)] if workspace else [])])
        folders = "the folders of all shards" if output else f"{shlex.quote(str(place.root))}/shard-*-of-{how.shard[1]}"
        note(f"next, once all {how.shard[1]} are done: {merge} {folders}")
        return
    target = output or place.analysis
    replaced = describe_old(target)
    with reading_of(data, options, how, place, beside) as request:
        analysis = write_analysis(request, target)
    if how.model is not None:
        warn_of_positions(analysis, how.model)
    print_analysis(analysis, as_json=as_json, replaced=replaced, beside=beside)
    print_next(output, workspace)


@contextmanager
def reading_of(
    data: list[str], options: IntakeOptions, how: AnalyzeOptions, place: Workspace, beside: list[str]
) -> Iterator[IntakeRequest]:
    """Yield the request, with its progress shown until the block ends; files that are no data go to `beside`.

    An error of unreadable sources gets the command that leaves them out as its hint.
    """
    from chunkplan.compiling import compiled_ahead
    from chunkplan.intake.reading import IntakeRequest
    from chunkplan.intake.source import UnreadableSourcesError

    try:
        with compiled_ahead(warn), reading_progress() as progress:
            yield IntakeRequest(
                paths={"train": data, "eval": how.eval},
                cache=place.cache,
                options=options,
                tokenizer=how.tokenizer,
                chat_template=how.chat_template,
                workers=how.workers,
                ray=how.ray,
                use_cache=how.use_cache,
                progress=progress,
                beside=beside.extend,
                notes=note,
            )
    except UnreadableSourcesError as error:
        command = shlex.join(["chunkplan", *sys.argv[1:], *_SKIP])
        if len(command) <= _LONGEST_COMMAND:
            error.hint = error.hint.replace(" ".join(_SKIP), f"`{command}`")
        raise


def _write_shard(request: IntakeRequest, target: Path, shard: tuple[int, int]) -> None:
    from chunkplan.intake.shard import write_shard

    write_shard(request, target, shard)
    note(f"shard {shard[0]} of {shard[1]} in {target}")


def with_length_column(values: Mapping[str, Any]) -> CliValues:
    """Return the values by field, with the `length_column` as the key of the role `length` among the columns."""
    if "length_column" not in values:
        return CliValues(values)
    columns = values.get("columns", {})
    if "length" in columns:
        raise UsageError("two columns for the role length", hint="give every role at most once")
    others = {name: value for name, value in values.items() if name != "length_column"}
    return CliValues({**others, "columns": {**columns, "length": values["length_column"]}})


def with_files(
    config: Path | None, place: Workspace, work: CliValues, intake: CliValues
) -> tuple[CliValues, CliValues]:
    """Merge the options of the command line with those of files, over which they win, and print those that are used.

    The file of --config wins over that of the workspace, whose entries may be for sources that are not there. Options
    by source or role are merged entry by entry.
    """
    called = {name: one.called for kind in (AnalyzeOptions, IntakeOptions) for name, one in options_of(kind).items()}
    joined = dict(with_length_column({**work, **intake}))
    files: list[tuple[Path, CliValues]] = []
    if config is not None:
        in_config = read_settings(config, AnalyzeOptions, IntakeOptions, section="analyze")
        files.append((config, with_length_column(in_config)))
    settings = {name: value for name, value in place.settings().items() if name != "tokenizer"}
    files += [(place.file, CliValues(settings))] if settings else []
    for file, in_file in files:
        replaced = [name for name in in_file if name in joined]
        instead = [called[name] for name in replaced if name not in ("columns", "formats", "ignore_columns")]
        for name in ("columns", "formats"):
            if name in in_file:
                given = SourceOverrides.of(joined.get(name, {}))
                places = {entry: _place(file, name, entry) for entry in in_file[name] if entry not in given}
                optional = given.optional | (places.keys() if file == place.file else set())
                joined[name] = SourceOverrides({**in_file[name], **given}, {**places, **given.places}, optional)
                replaced = [one for one in replaced if one != name or not places]
                instead += [f"{name}: {entry}" for entry in in_file[name] if entry in given]
        if "ignore_columns" in in_file and "ignore_columns" in joined:
            joined["ignore_columns"] = tuple(dict.fromkeys((*joined["ignore_columns"], *in_file["ignore_columns"])))
            replaced.remove("ignore_columns")
        joined = {**in_file, **joined}
        used = ", ".join(called[name] for name in in_file if name not in replaced) or "none"
        given_words = f"; given in place of what it says: {', '.join(instead)}" if instead else ""
        note(f"options from {file}: {used}{given_words}")
    fields = options_of(AnalyzeOptions)
    return (
        CliValues({name: value for name, value in joined.items() if name in fields}),
        CliValues({name: value for name, value in joined.items() if name not in fields}),
    )


def _place(file: Path, name: str, entry: str) -> str:
    """Location of an entry in a file: in the table `name`; columns of a source have a table of their own."""
    source, _, role = entry.rpartition(":") if name == "columns" else ("", "", entry)
    return f"{file}: {toml_name(name, *([source] if source else []), role)}"
