"""`analyze`: data of any kind -> an analysis folder, in bounded memory; the Python twin of the command.

Every record becomes one sequence, is counted as rejected with its reason, or is left out of a sample that was asked
for. The same records, tokenizer and options give the same content hash, whatever files they lie in, and whichever
processes or machines did the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chunkplan.config.intake import IntakeOptions
from chunkplan.files.folder import fill_folder, refuse_other_content
from chunkplan.intake.assemble import assemble
from chunkplan.intake.reading import IntakeRequest, Progress, read_all
from chunkplan.intake.tokenizer import TokenizerEntry
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis


def analyze(
    paths: str | Path | Sequence[str | Path],
    output: str | Path,
    options: IntakeOptions | None = None,
    *,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
    cache: str | Path | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Analysis:
    """Analyze data into the folder `output`, which is replaced as a whole at the end.

    Several processes are used where there is much to read.

    Args:
        paths: files, folders, patterns, URLs or "-", see `sources.find_sources`.
        output: the folder of the analysis.
        options: what is done with the records.
        tokenizer: a tokenizer.json, a folder with one, the name of a model on the Hugging Face Hub, or tiktoken:NAME.
            Without it the lengths of text are estimated and no tokens are stored.
        chat_template: a file with the template to use in place of the tokenizer's.
        workers: processes; one for every core by default.
        ray: the address of a Ray cluster ("local" starts one) that does the work in place of processes.
        cache: the folder of what was done before (see `store`); by default `cache` beside `output`.
        use_cache: False does everything anew.
        progress: called as records are read.

    Raises:
        UsageError: a path is not there, an option makes no sense, the disk has no room, or another run is writing
            `output`.
        DataError: a record is not what its source's schema says, or there is nothing to train on.
        ChunkplanError: a process was killed.
    """
    request = IntakeRequest(
        paths=paths,
        options=options or IntakeOptions(),
        tokenizer=tokenizer,
        chat_template=chat_template,
        cache=Path(cache or Path(output).parent / "cache"),
        use_cache=use_cache,
        workers=workers,
        ray=ray,
        progress=progress,
    )
    return write_analysis(request, Path(output))


def write_analysis(request: IntakeRequest, output: Path) -> Analysis:
    """Do what was asked for into the folder `output`, as `analyze` does, which documents it and what is raised."""
    refuse_other_content(output, "analysis")
    with read_all(request, output) as done:
        with fill_folder(output) as folder:
            tokenizer = done.tokenizer and _found_from(output, done.tokenizer)
            assemble(folder, done.sources, done.store.path, done.settings.options, tokenizer)
            analysis = load_analysis(folder)  # later, another run may have replaced it
        done.store.prune(piece.key for source in done.sources for piece in source.pieces)
    return replace(analysis, path=output)


def _found_from(output: Path, tokenizer: TokenizerEntry) -> TokenizerEntry:
    """The entry for a tokenizer whose path leads to it from an analysis in `output`, wherever one is then.

    A relative path does so from a folder above; where this folder is none of these, it is made absolute.
    """
    path = Path(tokenizer["path"])
    if not path.exists() or Path.cwd() in output.resolve().parents:
        return tokenizer
    return {**tokenizer, "path": str(path.absolute())}
