"""Whether torch and transformers are there: asked before they are needed, so that their absence is reported at once."""

from __future__ import annotations

import logging

from chunkplan.errors import UsageError
from chunkplan.extras import not_installed, pip_install

#: peft imports bitsandbytes wherever it is installed, and this part of it then warns, on every process, of a package
#: that would have made 4 bits on a CPU faster.
_WARNS_OF_KERNELS = "bitsandbytes.backends.cpu.ops"


def require_torch() -> None:
    """Import torch and transformers.

    Raises:
        UsageError: one is not installed, or its installation is broken.
    """
    logging.getLogger(_WARNS_OF_KERNELS).setLevel(logging.ERROR)
    try:
        import tokenizers  # noqa: F401  # without which transformers begins, and ends in a TypeError
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        raise not_installed(error) or UsageError(
            f"torch and transformers are needed ({error})", hint=pip_install("runtime")
        ) from error
