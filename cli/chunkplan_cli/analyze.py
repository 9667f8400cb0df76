"""`chunkplan analyze`: reads data, leaves an analysis in the workspace, shows how long the sequences are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import note, print_json, stdout, warn


def analyze(
    data: Annotated[list[Path], typer.Argument(metavar="DATA", help="JSONL files, or folders of *.jsonl files.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="tokenizer.json, or a folder with one. Default: CHUNKPLAN_TOKENIZER, then `tokenizer` of "
            "workspace.toml; without any, lengths are estimated from bytes.",
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", help="Cut longer sequences to their first N tokens.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write the analysis. Default: WORKSPACE/analysis.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the report.")] = False,
) -> None:
    """Measure the lengths of a dataset and store its tokens for the trainer.

    Records have `text`, `prompt` and `completion`, `messages`, or ShareGPT `conversations`.

    Which of them is found out for each file.

    Example: chunkplan analyze train.jsonl --tokenizer Qwen2.5-7B/
    """
    from chunkplan.intake.analyze import analyze as run
    from chunkplan.lengths import length_report
    from chunkplan.tuning.headline import headline
    from chunkplan.workspace import Workspace, find_tokenizer
    from chunkplan_cli.compilation import note_compilation
    from chunkplan_cli.length_report import print_length_report
    from chunkplan_cli.tune_report import headline_document, print_headline

    place = Workspace.find(workspace)
    target = output or place.analysis
    chosen = find_tokenizer(tokenizer, place)
    replaced = _describe_old(target)
    with progress("reading", "MB", 1_000_000) as report_progress:
        analysis = run(data, target, tokenizer=chosen, max_length=max_length, progress=report_progress)
    report = length_report(analysis)
    with note_compilation():
        gain = headline(analysis)
    if as_json:
        document = _document(analysis.path, report.to_dict(), analysis.manifest)
        print_json({**document, "headline": headline_document(gain) if gain else None})
    else:
        print_length_report(stdout(), report, analysis.manifest)
        if gain:
            print_headline(stdout(), gain)
    _close(analysis.path, analysis.manifest, replaced)
    next_command = ["chunkplan", "build", *([str(output)] if output else []), "--chunk-size", "8192", "--k", "4"]
    note("next: " + shlex.join([*next_command, *(["--workspace", str(workspace)] if workspace else [])]))


def _document(path: Path, report: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    kept = ("content_hash", "exact", "sources", "tokenizer", "template_hash", "options", "rejected", "truncated")
    return {"analysis": str(path), "report": report, **{name: manifest[name] for name in kept}}


def _describe_old(target: Path) -> str | None:
    """What `target` holds now, in words, if it is something that the new analysis replaces."""
    from chunkplan.errors import ChunkplanError
    from chunkplan.planfile.manifest import read_manifest

    if not target.is_dir() or not any(target.iterdir()):
        return None
    try:
        manifest = read_manifest(target, "analysis")
        sources = [source["path"] for source in manifest["sources"]]
        several = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        return f"the analysis of {sources[0]}{several}, {manifest['totals']['num_sequences']:,} sequences"
    except (ChunkplanError, LookupError, TypeError):
        return "something that is no analysis this version can read"


def _close(path: Path, manifest: dict[str, Any], replaced: str | None) -> None:
    """Say on stderr what was read and how, and where the analysis is."""
    for source in manifest["sources"]:
        note(f"read {source['path']}: {source['schema'] or 'no records'}, {source['records']:,} records")
    if not manifest["exact"]:
        warn("no tokenizer: lengths are estimated and no tokens are stored, enough to plan but not to train")
        note('hint: give --tokenizer FILE, set CHUNKPLAN_TOKENIZER, or put tokenizer = "FILE" in workspace.toml')
    note(f"analysis in {path}" + (f" (replaced {replaced})" if replaced else ""))
