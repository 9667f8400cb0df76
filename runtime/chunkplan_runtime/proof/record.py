"""What was proved of models, kept between runs: by their features and by everything that the result depends on."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from chunkplan.errors import UsageError
from chunkplan_runtime.domains import NO_ROUTER_LOSS
from chunkplan_runtime.models.checks import MODEL_TYPES
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.models.tiny import tiny_document
from chunkplan_runtime.proof.prove import ModelProof, UnprovedError, prove

_HINT = "docs/models.md has the models that are known to be exact, and why others are not"


def exact_router_loss(config: Any, asked: str | None, where: str, num_stages: int = 1) -> str:
    """What the load-balancing loss of a model is over, see `router_loss_scope`; refused if it is not exact with that.

    Raises:
        UsageError: see `router_loss_scope` and `check_exact`.
    """
    scope = router_loss_scope(config, asked, where)
    check_exact(config, where, num_stages=num_stages, router_loss=scope != NO_ROUTER_LOSS)
    return scope


def check_exact(config: Any, where: str, *, num_stages: int = 1, router_loss: bool = False) -> None:
    """Refuse a model for which chunked execution is not exact, on one stage or on several.

    With `router_loss` the load-balancing loss of its routers is proved too.

    Types that the tests of this project hold are let through, and what was proved before is not proved again, for the
    same features and versions.

    Raises:
        UsageError: with the error that was measured, or why none could be.
    """
    if config.model_type in MODEL_TYPES:
        return
    if bool(getattr(config, "output_router_logits", False)) != router_loss:
        config = copy.copy(config)
        config.output_router_logits = router_loss
    stages = min(num_stages, 2)
    on = " on pipeline stages" if stages > 1 else ""
    try:
        proof = proof_of(config, stages)
    except UnprovedError as error:
        raise UsageError(
            f"chunked gradients cannot be proved exact for model type {config.model_type!r}{on}: {error}",
            where=where,
            hint=_HINT,
        ) from error
    if not proof.holds:
        raise UsageError(
            f"chunked gradients of model type {config.model_type!r}{on} are off by {proof.error:.1e} "
            f"({proof.where}), as a small model of its class shows",
            where=where,
            hint=_HINT,
        )


def proof_of(config: Any, num_stages: int) -> ModelProof:
    """What is found for a model, or was found before for one of the same features with the same versions.

    Raises:
        UnprovedError: see `prove`.
    """
    proof = known_proof(config, num_stages)
    if proof is None:
        proof = prove(config, num_stages=num_stages)
        _keep(config, num_stages, proof)
    return proof


def known_proof(config: Any, num_stages: int) -> ModelProof | None:
    """What was found for a model of the same features with the same versions; None if nothing was."""
    try:
        return ModelProof(**json.loads(_place(config, num_stages).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(config: Any, num_stages: int, proof: ModelProof) -> None:
    """Write it down; where that is not possible, it is proved again the next time."""
    place = _place(config, num_stages)
    written = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(asdict(proof)), encoding="utf-8")
        written.replace(place)
    except OSError:
        return


def _place(config: Any, num_stages: int) -> Path:
    described = {"features": tiny_document(config.to_dict()), "stages": num_stages, "with": _versions()}
    key = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    cached = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cached) / "chunkplan" / "proofs" / f"{key}.json"


@cache
def _versions() -> dict[str, str]:
    """Of what the result depends on; of the runtime itself the content of its files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    own = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"torch": version("torch"), "transformers": version("transformers"), "runtime": own}
