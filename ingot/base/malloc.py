"""How glibc keeps and gives back the memory of this process, where it is the C library."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = (
    -1,
    -2,
    -3,
)  # names and numbers of glibc's malloc.h
MAPPED_BYTES = 2**25
"""The largest size from which on glibc maps allocations alone of its own accord."""
OWN_BYTES = 2**20
"""The size from which on blocks are mapped alone inside of `mapping_blocks`: each is found in its
own, and what is freed is the system's again.
"""


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks for the next step rather than return the pages and fault
    them in again.

    A CPU training step frees and allocates the same large tensors over and over; this saved a
    quarter of its time. Memory use no longer falls between steps, but its peak is the same. Does
    nothing with another C library.
    """
    _set_malloc(_M_MMAP_THRESHOLD, 2**30)
    _set_malloc(_M_TRIM_THRESHOLD, 2**31 - 1)
    _set_malloc(_M_TOP_PAD, 2**26)


@contextlib.contextmanager
def mapping_blocks() -> Iterator[None]:
    """Inside the block glibc maps each allocation of `OWN_BYTES` or more alone and unmaps it when
    it is freed, afterwards those of `MAPPED_BYTES`. Does nothing with another C library.
    """
    _set_malloc(_M_MMAP_THRESHOLD, OWN_BYTES)
    try:
        yield
    finally:
        _set_malloc(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def _set_malloc(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(option, value)


def give_back_pages(first: int, end: int) -> None:
    """Give the pages that lie wholly between two addresses of this process's own memory, which hold
    nothing but zeros, to the system; whoever reads them gets zeros.
    """
    first, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        with contextlib.suppress(OSError, AttributeError):
            advise = ctypes.CDLL("libc.so.6").madvise
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Return the pages of freed blocks to the system. Does nothing with another C library."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
