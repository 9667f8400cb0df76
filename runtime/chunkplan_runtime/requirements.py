"""Whether torch and transformers are there: asked before they are needed, so that their absence is reported at once."""

from __future__ import annotations

from chunkplan.errors import UsageError
from chunkplan.extras import pip_install


def require_torch() -> None:
    """Import torch and transformers.

    Raises:
        UsageError: one is not installed, or its installation is broken.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        raise UsageError(f"torch and transformers are needed ({error})", hint=pip_install("runtime")) from error
