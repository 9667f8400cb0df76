"""`chunkplan parity`: are the gradients of a plan those of whole sequences?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkplan_cli.completion import ATTENTION, one_of
from chunkplan_cli.terminal import print_json, stdout

if TYPE_CHECKING:
    from chunkplan_runtime.parity import ParityReport

_MAX_PARAMETERS = 10


def parity(
    lengths: Annotated[str, typer.Option(metavar="N,N,...", help="Lengths of the sequences, in tokens.")],
    chunk_size: Annotated[int, typer.Option(metavar="TOKENS", help="Most tokens in a chunk.")],
    k: Annotated[int, typer.Option("--k", metavar="N", help="Chunks of a sequence that hold activations at once.")],
    model_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's config.json, or its folder. Default: a tiny built-in model."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights and tokens.")] = 0,
    attention: Annotated[
        str,
        typer.Option(metavar="KERNEL", help="Attention kernel of the chunks.", autocompletion=one_of(ATTENTION)),
    ] = "auto",
    kv_offload: Annotated[bool, typer.Option("--kv-offload", help="Keep keys and values in host memory.")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute layers inside of a chunk's backward.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Compare the gradients of a plan with those of the same sequences run whole, in float64.

    Exit code 1 if the worst relative error is above 1e-12. `validate` checks the files of a plan.

    Example: chunkplan parity --lengths 700,130,90 --chunk-size 128 --k 2
    """
    from chunkplan.errors import UsageError
    from chunkplan_runtime.requirements import require_torch

    try:
        numbers = [int(length) for length in lengths.split(",")]
    except ValueError:
        raise UsageError(
            f"--lengths is {lengths!r}, expected whole numbers with commas between", hint="--lengths 700,130,90"
        ) from None
    require_torch()
    from chunkplan_runtime.parity import parity as run

    result = run(
        numbers,
        chunk_size,
        k,
        model_config=model_config,
        seed=seed,
        attention=attention,
        kv_offload=kv_offload,
        checkpointing=checkpointing,
    )
    if as_json:
        print_json(asdict(result))
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _print(result: ParityReport) -> None:
    console = stdout()
    counts = ", ".join(f"{count} {kind}" for kind, count in result.chunks.items() if count)
    console.print(f"chunks: {counts}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("parameter", header_style="dim", overflow="fold")
    table.add_column("relative error", header_style="dim", justify="right", no_wrap=True)
    for name, error in sorted(result.relative_errors.items(), key=lambda item: -item[1])[:_MAX_PARAMETERS]:
        table.add_row(name, f"{error:.1e}")
    console.print(table)
    if len(result.relative_errors) > _MAX_PARAMETERS:
        console.print(f"... and {len(result.relative_errors) - _MAX_PARAMETERS} smaller (--json shows all)")
    if result.vanishing:
        console.print(f"zero but for rounding: {', '.join(result.vanishing)}")
    console.print(f"loss: {result.loss:.12f} in chunks, {result.reference_loss:.12f} whole")
    verdict = "exact" if result.passed else "NOT exact"
    console.print(f"{verdict}: worst relative error {result.max_relative_error:.1e}, at most {result.tolerance:.0e}")
