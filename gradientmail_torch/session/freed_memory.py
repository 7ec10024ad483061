"""Large memory goes back to the system when it is freed, where the model trains on a device of its own.

A session's threads take and free fragments all the time. glibc keeps what is freed in an arena for each thread, among
small objects that hold it there: two to three models in fp32 (``python -m benchmarks micro memory``). Mapped by itself,
a large piece goes as it comes, for a page fault in the background. Where the processor itself trains, activations
would pay for that too, so there it is left to the user: ``MALLOC_MMAP_THRESHOLD_=1048576``.
"""

from __future__ import annotations

import ctypes
import os

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h


def give_back_freed() -> bool:
    """For this process, from now on. False where the allocator is another than glibc's, or somebody has set it otherwise."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(set_option(_M_MMAP_THRESHOLD, LARGE_BYTES))
