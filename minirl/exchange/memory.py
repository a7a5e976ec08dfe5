"""Memory of this process."""

from __future__ import annotations

import ctypes
import os


def trim() -> None:
    """Return freed memory to the system where its C library keeps it, as glibc does, for each
    thread apart.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if release is not None:
        release(0)
