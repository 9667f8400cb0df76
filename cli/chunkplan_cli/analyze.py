"""`chunkplan analyze`: reads data, leaves an analysis in the workspace, shows how long the sequences are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan_cli.analysis_report import describe_old, print_analysis, print_next
from chunkplan_cli.declared import Given, JsonOption, WorkspaceOption, takes
from chunkplan_cli.progress import reading_progress
from chunkplan_cli.terminal import note

_TOKENS, _WORK = "Records and tokens", "How the work is done"


@takes(intake=IntakeOptions)
def analyze(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA", help="Files, folders, patterns or URLs of data; - is JSONL from the standard input."
        ),
    ],
    *,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A tokenizer.json, a folder with one, the name of a model on the Hugging Face Hub, or tiktoken:NAME. "
            "Default: CHUNKPLAN_TOKENIZER, then `tokenizer` of workspace.toml; without any, lengths are estimated "
            "from bytes.",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A Jinja chat template in place of the tokenizer's.", rich_help_panel=_TOKENS
        ),
    ] = None,
    length_column: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Read lengths only, from this key or column.", rich_help_panel=_TOKENS),
    ] = None,
    intake: Given,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes. Default: one for every core.", rich_help_panel=_WORK)
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Do one of N shares, for `chunkplan merge` to put together.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Have a Ray cluster do the work; `local` starts one on this machine.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Do everything anew, whatever was done before.", rich_help_panel=_WORK)
    ] = False,
    headline: Annotated[
        bool,
        typer.Option(
            "--headline",
            help="Also predict what chunks would gain, for Qwen2.5-7B on 16 H100s. Takes some seconds.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write. Default: analysis, or shard-I-of-N, of the workspace."),
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the lengths of a dataset and store its tokens for the trainer.

    Reads .jsonl, .json, .parquet, .arrow, .txt and .npy; text also in .gz, .zst
    and .bz2. Records have `text`, `messages`, ShareGPT `conversations`, `prompt`
    and `completion`, `instruction` and `output`, `question` and `answer`,
    `input_ids`, or a bare `length`: found out for each source, and shown.

    Unchanged files cost nothing the next time, and interrupted runs go on. With
    `--shard`, `merge` puts together what several machines have read.

    Example: chunkplan analyze train.jsonl --tokenizer Qwen2.5-7B/
    """
    from chunkplan.errors import UsageError
    from chunkplan.intake.analyze import analyze as run
    from chunkplan.intake.reading import IntakeRequest
    from chunkplan.intake.shard import write_shard
    from chunkplan.workspace import Workspace, find_tokenizer

    for other, is_given in (("--json", as_json), ("--shard", shard is not None)):
        if headline and is_given:
            raise UsageError(
                f"--headline and {other} exclude each other",
                hint="leave it out; `chunkplan tune --json` predicts for your model and GPUs",
            )
    place = Workspace.find(workspace)
    options = IntakeOptions(**_with_length_column(intake, length_column))
    chosen = find_tokenizer(tokenizer, place)
    if shard is not None:
        index, count = _parse_shard(shard)
        target = output or place.root / f"shard-{index}-of-{count}"
        with reading_progress() as progress:
            request = IntakeRequest(
                paths=data,
                cache=place.cache,
                options=options,
                tokenizer=chosen,
                chat_template=chat_template,
                use_cache=not no_cache,
                workers=workers,
                ray=ray,
                progress=progress,
            )
            write_shard(request, target, (index, count))
        note(f"shard {index} of {count} in {target}")
        merge = shlex.join(["chunkplan", "merge", *(["--workspace", str(workspace)] if workspace else [])])
        folders = "the folders of all shards" if output else f"{shlex.quote(str(place.root))}/shard-*-of-{count}"
        note(f"next, once all {count} are done: {merge} {folders}")
        return
    target = output or place.analysis
    replaced = describe_old(target)
    with reading_progress() as progress:
        analysis = run(
            data,
            target,
            options,
            tokenizer=chosen,
            chat_template=chat_template,
            workers=workers,
            ray=ray,
            cache=place.cache,
            use_cache=not no_cache,
            progress=progress,
        )
    print_analysis(analysis, as_json=as_json, replaced=replaced, gain=headline)
    print_next(output, workspace)


def _with_length_column(intake: Given, key: str | None) -> dict[str, Any]:
    """The options, with the key of the role `length` among the columns."""
    if key is None:
        return intake
    columns = intake.get("columns", {})
    if "length" in columns:
        raise UsageError("two columns for the role length", hint="give every role at most once")
    return {**intake, "columns": {**columns, "length": key}}


def _parse_shard(text: str) -> tuple[int, int]:
    """I/N.

    Raises:
        UsageError: it is not that.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text!r}, expected I/N", hint="for example --shard 1/8 to --shard 8/8")
    return int(match[1]), int(match[2])
