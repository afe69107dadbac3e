"""One part of a ragged column: Megatron's `.bin` (all elements) and `.idx` (where each record lies), version 1.

Layout of `.idx`, little-endian: magic, version uint64, type code uint8, record count uint64, document-index count uint64,
lengths int32[n], byte pointers int64[n], document indices int64[n + 1] (every record is a document of its own).
"""

from __future__ import annotations

import array
import bisect
import contextlib
import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.storage import atomic_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"), 2: np.dtype("int8"), 3: np.dtype("int16"), 4: np.dtype("int32"),
    5: np.dtype("int64"), 6: np.dtype("float64"), 7: np.dtype("float32"), 8: np.dtype("uint16"),
}
UINT16_BELOW = 65_500
AGAIN = "run `ingot prepare` again"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type of a token column: uint16 for a vocabulary below 65,500, else int32, as Megatron chooses."""
    return np.dtype("uint16" if vocab_size < UINT16_BELOW else "int32")


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


class ColumnWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`; both appear whole when the block ends without an error, the index last.

    >>> with ColumnWriter(folder / "train.tokens-00000", np.dtype("uint16")) as writer:
    ...     writer.append(flat, lengths)
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.elements = 0
        self._lengths = array.array("i")
        self._stack = contextlib.ExitStack()

    @property
    def records(self) -> int:
        return len(self._lengths)

    def __enter__(self) -> ColumnWriter:
        self._stream: IO[bytes] = self._stack.enter_context(atomic_file(bin_path(self.prefix)))
        return self

    def append(self, flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Add records: all their elements one after the other, and how many each has."""
        self._stream.write(np.ascontiguousarray(flat, self.dtype).data)
        self._lengths.frombytes(np.ascontiguousarray(lengths, np.int32).tobytes())
        self.elements += len(flat)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, value, trace)
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        code = next(code for code, dtype in CODES.items() if dtype == self.dtype)
        with atomic_file(idx_path(self.prefix)) as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            stream.write(lengths.tobytes())
            stream.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).tobytes())
            stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


class Column:
    """Reads one part, memory-mapped: opening it and finding a record cost the same for a thousand records and a billion.

    Raises:
        WrongInput: a file is missing, is no index of this version, or the two do not fit together.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = _mapped(idx_path(prefix))
        if len(index) < HEADER.size:
            raise WrongInput(f"{idx_path(prefix)} is cut short at {len(index)} bytes; {AGAIN}")
        magic, version, code, self.records, documents = HEADER.unpack_from(index)
        if magic != MAGIC or version != VERSION or code not in CODES:
            raise WrongInput(f"{idx_path(prefix)} is not a Megatron index of version {VERSION}; {AGAIN}")
        self.dtype = CODES[code]
        expected = HEADER.size + 12 * self.records + 8 * documents
        if len(index) != expected:
            raise WrongInput(f"{idx_path(prefix)} has {len(index)} bytes, its header says {expected}; {AGAIN}")
        view = memoryview(index)
        lengths_end = HEADER.size + 4 * self.records
        self._lengths = view[HEADER.size : lengths_end].cast("i")
        # The 34 bytes of the header leave the pointers unaligned. NumPy's searchsorted would copy all of them at each
        # call; a memoryview reads one at a time wherever it lies.
        self._pointers = view[lengths_end : lengths_end + 8 * self.records].cast("q")
        self._data = np.frombuffer(_mapped(bin_path(prefix)), np.uint8)
        size = self._pointers[-1] + self._lengths[-1] * self.dtype.itemsize if self.records else 0
        if len(self._data) != size or size % self.dtype.itemsize:
            raise WrongInput(f"{bin_path(prefix)} has {len(self._data)} bytes, its index says {size}; {AGAIN}")
        self._elements = self._data.view(self.dtype)

    def __len__(self) -> int:
        return int(self.records)

    @property
    def elements(self) -> int:
        return len(self._elements)

    def __getitem__(self, record: int) -> npt.NDArray[Any]:
        """The elements of one record, a view of the file."""
        begin = self._pointers[record] // self.dtype.itemsize
        return self._elements[begin : begin + self._lengths[record]]

    def slice(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Elements `begin` to `end` of all records seen as one stream, a view of the file."""
        return self._elements[begin:end]

    def starts(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Where in `begin` to `end` of the stream records begin, ascending, found by bisection."""
        size = self.dtype.itemsize
        first = bisect.bisect_left(self._pointers, begin * size)
        last = bisect.bisect_left(self._pointers, end * size, lo=first)
        return np.array(self._pointers[first:last], np.int64) // size


def _mapped(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as stream:
            # An empty file cannot be mapped.
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing; {AGAIN}") from None
