"""manifest.json: read with its version and entries checked, written indented."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import FULL, AttentionPattern
from chunkplan.cost.states import reduction_ns
from chunkplan.domains import find_mismatch
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.files.json_file import read_json, refuse_outside
from chunkplan.planfile.manifest_entries import ANALYSIS, PLAN
from chunkplan.planfile.schema import SCHEMA_VERSION

_HINT = "write it again with `chunkplan analyze` or `chunkplan build`"


def config_of(manifest: Mapping[str, Any]) -> PlanConfig:
    """The configuration that the manifest of a plan holds."""
    return PlanConfig.from_entries(manifest["config"])


def reduction_us_of(manifest: Mapping[str, Any]) -> float | None:
    """What the ranks of a plan take at the end of each step to sum gradients and share what was updated, microseconds.

    `predicted_us` is without it. None where the plan does not describe the model and the GPU it was made for.
    """
    config, cost = config_of(manifest), cost_of(manifest)
    if cost is None:
        return None
    return (
        reduction_ns(
            cost, dp=config.dp, pp=config.pp, layers=config.layers(cost.shape.num_layers), placement=config.placement
        )
        / 1e3
    )


def attention_patterns_of(manifest: Mapping[str, Any]) -> tuple[AttentionPattern, ...]:
    """What the attention sees of the model that a plan was made for; all where the plan does not describe it."""
    cost = cost_of(manifest)
    return FULL if cost is None else cost.shape.attention_patterns


def cost_of(manifest: Mapping[str, Any]) -> CostModel | None:
    """The model and the GPU that a plan was made for; None where its manifest does not describe them."""
    try:
        return CostModel.from_dict(manifest["predictions"]["cost_model"], where=MANIFEST)
    except DataError:
        return None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `folder/manifest.json`; NaN and infinity are refused because JSON has none."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def how_to_build_beside(plan: Path, name: str, *words: str) -> str:
    """The command that builds a plan like `plan`, with the options in `words`, beside it."""
    named = plan.resolve() if plan.name in ("", "..") else plan
    output = named.with_name(f"{named.name}-{name}")
    return shlex.join(["chunkplan", "build", "--like", str(plan), *words, "--output", str(output)])


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a folder that should be of `kind` ("analysis" or "plan").

    Raises:
        UsageError: there is no such folder, or it has no manifest.
        DataError: it is a link out of the folder, is not JSON (see `json_file.read_json`), is of the other kind, was
            written by another schema version, lacks an entry, or was replaced while it was read.
    """
    path = folder / MANIFEST
    if not path.exists():
        what = f"{folder} has no {MANIFEST}" if folder.is_dir() else f"there is no {kind} at {folder}"
        if (folder / kind / MANIFEST).exists():
            raise UsageError(what, hint=f"give the {kind} in it, {shlex.quote(str(folder / kind))}")
        command = "chunkplan analyze" if kind == "analysis" else "chunkplan build"
        raise UsageError(what, hint=f"`{command}` writes one; give its folder")
    refuse_outside(path, folder)
    try:
        manifest = read_json(path, hint=_HINT)
    except FileNotFoundError as error:
        raise DataError("the folder was replaced while it was read", where=str(path), hint="try again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") not in ("analysis", "plan"):
        raise DataError("not the manifest of an analysis or a plan", where=str(path), hint=_HINT)
    if manifest["kind"] != kind:
        raise DataError(
            f"expected the manifest of one {kind}, found one of kind {manifest['kind']}",
            where=str(path),
            hint=f"give the folder of the {kind}",
        )
    version = manifest.get("schema_version")
    if type(version) is not int or version < 1:
        raise DataError(f"schema_version is {version!r}, expected a whole number from 1", where=str(path), hint=_HINT)
    if version != SCHEMA_VERSION:
        again = "analyze the data again" if kind == "analysis" else "analyze and build again"
        raise DataError(
            f"written by schema version {version} (chunkplan {manifest.get('tool_version')}); "
            f"this chunkplan reads version {SCHEMA_VERSION}",
            where=str(path),
            hint=again if version < SCHEMA_VERSION else f"upgrade chunkplan, or {again} with this version",
        )
    mismatch = find_mismatch(manifest, ANALYSIS if kind == "analysis" else PLAN)
    if mismatch:
        raise DataError(mismatch, where=str(path), hint=_HINT)
    return manifest
