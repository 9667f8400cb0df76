"""What comes before torch: what it and CUDA read when they begin, and whether torch and transformers are there."""

from __future__ import annotations

import logging
import os

from chunkplan.errors import UsageError
from chunkplan.extras import not_installed, pip_install

#: peft imports bitsandbytes wherever it is installed, and this part of it then warns, on every process, of a package
#: that would have made 4 bits on a CPU faster.
_WARNS_OF_KERNELS = "bitsandbytes.backends.cpu.ops"

#: What CUDA is told where there are several processes. A GPU waits in sends and receives for other processes. By
#: default CUDA loads a kernel when it is first asked for, and waits for the device to do so; and it has 8 queues, so
#: that what is in a ninth stream may come behind a receive that waits.
_OF_SEVERAL = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

#: How torch takes memory on a GPU, under both of its names: a chunk takes what others of other sizes have given back.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_environment() -> None:
    """Set what torch and CUDA read, for a process that trains, unless it is set already."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a page of C++ stack about a process that is gone
    if os.environ.get("WORLD_SIZE", "1") != "1":
        set_for_several_processes()
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def set_for_several_processes() -> None:
    """Set what CUDA reads when it is first asked for something, unless it is set already."""
    for name, value in _OF_SEVERAL.items():
        os.environ.setdefault(name, value)


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
