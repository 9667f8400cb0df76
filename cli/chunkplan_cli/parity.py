"""`chunkplan parity`: are the gradients of a plan those of whole sequences?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import MODEL_SOURCE, CostModel
from chunkplan.domains import FLAG, MOST, several, tokens, whole
from chunkplan.options import Options, option, same
from chunkplan.reporting.tables import Table
from chunkplan_cli.declared import CliValues, JsonOption, make, takes
from chunkplan_cli.terminal import drawn_table, print_json, stdout
from chunkplan_runtime.training.config import KERNEL

if TYPE_CHECKING:
    from chunkplan_runtime.parity import ParityReport

_MAX_PARAMETERS = 10

_WHAT, _HOW = "What is compared", "How chunks are run"


@dataclass(frozen=True, kw_only=True)
class ParityOptions(Options):
    """The sequences and the model that are compared, and how chunks of them are run."""

    lengths: tuple[int, ...] = option(
        several(tokens(), metavar="N,N,...", example="700,130,90"), "Lengths of the sequences, in tokens.", group=_WHAT
    )
    chunk_size: int = same(PlanConfig, "chunk_size", group=_WHAT)
    k: int = option(whole(1, MOST), "Most chunks of a sequence that hold activations.", group=_WHAT)
    model: Path | str | None = option(
        MODEL_SOURCE,
        "The model: its name on the Hugging Face Hub, or its config.json or folder.",
        group=_WHAT,
        default=None,
        default_words="a tiny built-in model",
    )
    seed: int = option(whole(), "Seed of weights and tokens.", group=_WHAT, default=0)
    attention: str = option(KERNEL, "Name of the attention kernel, or auto.", group=_HOW, default="auto")
    kv_offload: bool = option(
        FLAG, "Keep keys and values of split sequences in host memory.", group=_HOW, default=False
    )
    checkpointing: str = same(CostModel, "checkpointing", group=_HOW)


@takes(asked=ParityOptions)
def parity(*, asked: CliValues, as_json: JsonOption = False) -> None:
    """Compare the gradients of a plan with those of the same sequences run whole, in float64.

    With --model, a small model of the same class and features runs first, on one pipeline stage and on two. A
    model of more than 300M weights does not run itself. Exit code 1 if the worst relative error is above 1e-12, or
    1e-10 for models that are proved at load. `validate` checks the files of a plan.

    Example: chunkplan parity --lengths 700,130,90 --chunk-size 128 --k 2
    """
    from chunkplan_runtime import require_torch

    options = asdict(make(ParityOptions, asked))
    require_torch()
    from chunkplan_runtime.parity import parity as run

    result = run(options.pop("lengths"), options.pop("chunk_size"), options.pop("k"), **options)
    if as_json:
        print_json(asdict(result))
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _print(result: ParityReport) -> None:
    console = stdout()
    if result.proofs:
        head = ("small model of its class", "relative error", "worst parameter")
        proofs = []
        for proof in result.proofs:
            error = "not proved" if proof.error is None else f"{proof.error:.1e}"
            proofs.append(("one stage" if proof.num_stages == 1 else "two stages", error, proof.where))
        console.print(drawn_table(console, Table("", head, proofs, texts=(head[0], head[2]))))
    if result.ran_small:
        console.print("the model has more than 300M weights: the sequences are run on the small one")
    counts = ", ".join(f"{count} {kind}" for kind, count in result.chunks.items() if count)
    console.print(f"chunks: {counts}")
    worst = sorted(result.relative_errors.items(), key=lambda item: -item[1])[:_MAX_PARAMETERS]
    rows = [(name, f"{error:.1e}") for name, error in worst]
    console.print(drawn_table(console, Table("", ("parameter", "relative error"), rows, texts=("parameter",))))
    if len(result.relative_errors) > _MAX_PARAMETERS:
        console.print(f"... and {len(result.relative_errors) - _MAX_PARAMETERS} smaller (--json shows all)")
    if result.vanishing:
        console.print(f"zero but for rounding: {', '.join(result.vanishing)}")
    console.print(f"loss: {result.loss:.12f} in chunks, {result.reference_loss:.12f} whole")
    outcome = "exact" if result.passed else "NOT exact"
    console.print(f"{outcome}: worst relative error {result.max_relative_error:.1e}, at most {result.tolerance:.0e}")
