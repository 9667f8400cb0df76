"""`chunkplan analyze`: reads data, leaves an analysis in the workspace, shows how long the sequences are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from chunkplan.intake.options import LONG, MAX_RECORD_BYTES, ON_ERROR, UNDESIRABLE
from chunkplan_cli.analysis_report import describe_old, print_analysis, print_next
from chunkplan_cli.completion import SCHEMAS, one_of
from chunkplan_cli.progress import reading_progress
from chunkplan_cli.terminal import note

_TOKENS, _DATA, _WORK = "Records and tokens", "What is read and what is kept", "How the work is done"


def analyze(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA", help="Files, folders, patterns or URLs of data; - is JSONL from the standard input."
        ),
    ],
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
    schema: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="How records are laid out: text, messages, conversations, prompt+completion, instruction, "
            "question+answer, input_ids or length. Default: found out for each source.",
            rich_help_panel=_TOKENS,
            autocompletion=one_of(SCHEMAS),
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="ROLE=KEY",
            help="A key that is not named like its role: text=body. Repeatable.",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    length_column: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Read lengths only, from this key or column.", rich_help_panel=_TOKENS),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a sequence at most. Default: all are kept.", rich_help_panel=_TOKENS),
    ] = None,
    long: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What becomes of sequences over --max-length: error, drop or truncate.",
            rich_help_panel=_TOKENS,
            autocompletion=one_of(LONG),
        ),
    ] = "truncate",
    on_error: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="At a record that cannot become a sequence: stop, or skip, that is count it, list it and go on. "
            "Blank records are counted in any case.",
            rich_help_panel=_DATA,
            autocompletion=one_of(ON_ERROR),
        ),
    ] = "stop",
    undesirable: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="What becomes of answers labelled as bad ones, as KTO has them (`label`: false): error or drop.",
            rich_help_panel=_DATA,
            autocompletion=one_of(UNDESIRABLE),
        ),
    ] = "error",
    no_tokens: Annotated[
        bool,
        typer.Option("--no-tokens", help="Store lengths only: enough to plan, not to train.", rich_help_panel=_DATA),
    ] = False,
    sample: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Read this share of the records, such as 0.01: enough to plan roughly.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    max_record_mb: Annotated[
        float,
        typer.Option(
            metavar="MB",
            help="Larger records are errors; each MB may take 130 MB of memory in each process.",
            rich_help_panel=_DATA,
        ),
    ] = MAX_RECORD_BYTES // 1_000_000,
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
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the report.")] = False,
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
    from chunkplan.intake.options import IntakeOptions
    from chunkplan.intake.reading import IntakeRequest
    from chunkplan.intake.shard import write_shard
    from chunkplan.workspace import Workspace, find_tokenizer
    from chunkplan_cli.intake_options import parse_columns, parse_megabytes, parse_shard

    for other, is_given in (("--json", as_json), ("--shard", shard is not None)):
        if headline and is_given:
            raise UsageError(
                f"--headline and {other} exclude each other",
                hint="leave it out; `chunkplan tune --json` predicts for your model and GPUs",
            )
    place = Workspace.find(workspace)
    options = IntakeOptions(
        schema=schema,
        columns=parse_columns(columns or [], length_column),
        max_length=max_length,
        long=long,
        on_error=on_error,
        undesirable=undesirable,
        tokens=not no_tokens,
        sample=sample,
        max_record_bytes=parse_megabytes(max_record_mb),
    )
    chosen = find_tokenizer(tokenizer, place)
    if shard is not None:
        index, count = parse_shard(shard)
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
