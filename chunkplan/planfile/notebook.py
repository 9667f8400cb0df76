"""Notebook view of a plan or an analysis: a small HTML table from the manifest and the lengths alone.

Colours are the notebook's own, so that it is readable on light and on dark. Nothing of the files is trusted: all of it
is escaped, and what would not be seen is a symbol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.arrays import Int32Array
from chunkplan.errors import visible
from chunkplan.planfile.manifest import config_of, reduction_us_of
from chunkplan.quantities import counted, k_words, layout_words, seconds, selection_words

#: Hexadecimal digits of a content hash that are shown.
_SHOWN = 16

#: Sources that are named.
_NAMED = 3

_TABLE = "border-collapse:collapse;border:none;background:none;color:inherit;font-size:inherit;margin:0.4em 0"
_NAME = "text-align:left;opacity:0.7;font-weight:normal;white-space:nowrap;padding:0.1em 1.2em 0.1em 0;border:none"
_VALUE = "text-align:left;padding:0.1em 0;border:none;background:none;overflow-wrap:anywhere"


def plan_html(path: Path, manifest: dict[str, Any]) -> str:
    """A plan: what it was built with, what it comes to, and what of it is predicted."""
    config, totals, predictions = config_of(manifest), manifest["totals"], manifest["predictions"]
    cost_model, selection = predictions["cost_model"], manifest["selection"]
    reduction = (reduction_us_of(manifest) or 0.0) * totals["num_steps"]
    part = " of held-out sequences" if config.part == "eval" else ""
    most = min(config.global_batch, totals["num_sequences"])
    return _html(
        f"chunkplan plan{part}",
        path,
        manifest["analysis"],
        [
            ("ChunkSize, K", f"{config.chunk_size:,} tokens, {k_words(config.k, config.k_by_length)}"),
            ("layout", f"{layout_words(config.dp, cost_model['tp'], config.pp)}, {config.schedule}"),
            ("steps", f"{totals['num_steps']:,}, of up to {counted(most, 'sequence')}, seed {config.seed}"),
            ("sequences", f"{totals['num_sequences']:,}, the longest {counted(totals['longest_sequence'], 'token')}"),
            ("tokens", f"{totals['num_tokens']:,}, of which {totals['num_target_tokens']:,} targets"),
            *([("epochs", f"{config.epochs:,}")] if config.epochs > 1 else []),
            *selection_words(config, num_held_out=selection["num_held_out"], num_sequences=selection["num_sequences"]),
            ("chunks", f"{totals['num_chunks']:,}"),
            ("predicted", seconds(predictions["predicted_us"] + reduction)),
            ("predicted for", f"{cost_model['shape']['name']} on {cost_model['hardware']['name']}"),
            ("analysis", manifest["analysis"]["path"]),
            ("content hash", manifest["content_hash"][:_SHOWN]),
        ],
    )


def analysis_html(
    path: Path,
    manifest: dict[str, Any],
    content_hash: str,
    num_tokens: Int32Array,
    num_target_tokens: Int32Array,
) -> str:
    """An analysis, or a bare file of lengths: how many sequences, how long, from where."""
    total = int(num_tokens.sum(dtype=np.int64))
    middle, high = (int(np.quantile(num_tokens, share, method="inverted_cdf")) for share in (0.5, 0.99))
    rejected = sum(manifest.get("rejected", {}).values())
    rows = [
        ("sequences", f"{len(num_tokens):,}" + (f"; rejected: {rejected:,}" if rejected else "")),
        ("tokens", f"{total:,}, of which {int(num_target_tokens.sum(dtype=np.int64)):,} targets"),
        ("lengths", f"mean {total / len(num_tokens):,.0f}, median {middle:,}, 99% up to {high:,}"),
        ("the longest", counted(int(num_tokens.max()), "token")),
    ]
    if sources := manifest.get("sources"):
        more = f" and {len(sources) - _NAMED:,} more" if len(sources) > _NAMED else ""
        rows.append(("sources", ", ".join(str(source["path"]) for source in sources[:_NAMED]) + more))
    tokenizer = manifest.get("tokenizer")
    rows.append(("tokenizer", str(tokenizer["path"]) if isinstance(tokenizer, dict) else "none"))
    rows.append(("tokens stored", "yes" if manifest.get("tokens") else "no: enough to plan, not to train"))
    rows.append(("content hash", content_hash[:_SHOWN]))
    return _html("chunkplan analysis", path, manifest, rows)


def _html(title: str, path: Path, analysis: Mapping[str, Any], rows: Iterable[tuple[str, str]]) -> str:
    """`analysis`: says whether it is `exact`, and what share of the records it is a `sample` of."""
    sample = analysis.get("sample")
    warnings = [f"A SAMPLE of {100 * sample:g}% of the records"] if sample else []
    warnings += [] if analysis["exact"] else ["ESTIMATED lengths, from bytes: to look at, not to train"]
    said = "".join(f'<div style="font-weight:bold">{escape(warning)}</div>' for warning in warnings)
    cells = "".join(
        f'<tr style="background:none"><th scope="row" style="{_NAME}">{escape(name)}</th>'
        f'<td style="{_VALUE}">{escape(visible(value))}</td></tr>'
        for name, value in rows
    )
    heading = f"<div><strong>{escape(title)}</strong> <code>{escape(visible(str(path)))}</code></div>"
    return f'<div>{heading}{said}<table style="{_TABLE}"><tbody>{cells}</tbody></table></div>'
