"""`chunkplan analyze`: reads data, leaves an analysis in the workspace, shows how long the sequences are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from chunkplan_cli.analysis_report import describe_old, print_analysis, print_next
from chunkplan_cli.progress import reading_progress
from chunkplan_cli.terminal import note


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
            metavar="FILE|FOLDER|NAME",
            help="tokenizer.json, a folder with one, a model's name on the Hugging Face Hub, or tiktoken:NAME. "
            "Default: CHUNKPLAN_TOKENIZER, then `tokenizer` of workspace.toml; without any, lengths are estimated "
            "from bytes.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Jinja chat template in place of the tokenizer's.")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="How records are laid out: text, messages, conversations, prompt+completion, instruction, "
            "question+answer, input_ids or length. Default: found out for each source.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="ROLE=KEY", help="A key that is not named like its role: text=body."),
    ] = None,
    length_column: Annotated[
        str | None, typer.Option(metavar="KEY", help="Read lengths only, from this key or column.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a sequence at most. Default: all are kept.")
    ] = None,
    long: Annotated[
        str, typer.Option(metavar="error|drop|truncate", help="What becomes of sequences over --max-length.")
    ] = "truncate",
    on_error: Annotated[
        str,
        typer.Option(
            metavar="stop|skip", help="At a record that cannot be read: stop, or count it, list it and go on."
        ),
    ] = "stop",
    tokens: Annotated[
        bool, typer.Option(" /--no-tokens", help="Store lengths only: enough to plan, not to train.")
    ] = True,
    sample: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Read this share of the records, such as 0.01: enough to plan roughly."),
    ] = None,
    max_record_mb: Annotated[
        float, typer.Option(metavar="MB", help="Larger records are errors; each MB takes about 65 MB of memory.")
    ] = 16,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes. Default: one for every core.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Have a Ray cluster do the work; `local` starts one on this machine."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do one of N shares, for `chunkplan merge` to put together."),
    ] = None,
    use_cache: Annotated[
        bool, typer.Option(" /--no-cache", help="Do everything anew, whatever was done before.")
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write. Default: WORKSPACE/analysis or WORKSPACE/shard-I-of-N."),
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the report.")] = False,
) -> None:
    """Measure the lengths of a dataset and store its tokens for the trainer.

    Reads .jsonl, .json, .parquet, .arrow, .txt and .npy, compressed or not, and folders that Hugging Face datasets
    saved. Records have `text`, `messages`, ShareGPT `conversations`, `prompt` and `completion`, `instruction`,
    `question` and `answer`, `input_ids`, or a bare `length`; which of them is found out for each source.

    What was done before is not done again: unchanged files cost nothing, interrupted runs go on.

    Example: chunkplan analyze train.jsonl --tokenizer Qwen2.5-7B/
    """
    from chunkplan.intake.analyze import analyze as run
    from chunkplan.intake.options import IntakeOptions
    from chunkplan.intake.reading import Request
    from chunkplan.intake.shard import write_shard
    from chunkplan.workspace import Workspace, find_tokenizer
    from chunkplan_cli.intake_options import parse_columns, parse_shard

    place = Workspace.find(workspace)
    options = IntakeOptions(
        schema=schema,
        columns=parse_columns(columns or [], length_column),
        max_length=max_length,
        long=long,
        on_error=on_error,
        tokens=tokens,
        sample=sample,
        max_record_bytes=round(max_record_mb * 1_000_000),
    )
    chosen = find_tokenizer(tokenizer, place)
    if shard is not None:
        index, count = parse_shard(shard)
        target = output or place.root / f"shard-{index}-of-{count}"
        with reading_progress() as progress:
            request = Request(data, options, chosen, chat_template, place.cache, use_cache, workers, ray, progress)
            write_shard(request, target, (index, count))
        note(f"shard {index} of {count} in {target}")
        note(
            "next, with all of them: " + shlex.join(["chunkplan", "merge", str(target.parent / f"shard-*-of-{count}")])
        )
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
            use_cache=use_cache,
            progress=progress,
        )
    print_analysis(analysis, as_json=as_json, replaced=replaced)
    print_next(output, workspace)
