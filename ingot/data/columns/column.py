"""One part of a ragged column: Megatron's `.bin` (all elements) and `.idx` (where each record
lies), version 1.

Layout of `.idx`, little-endian: magic, version uint64, type code uint8, record count uint64,
document-index count uint64, lengths int32[n], byte pointers int64[n], document indices int64[n + 1]
(every record is a document of its own).
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

from ingot.base.errors import Failed, WrongInput
from ingot.base.openfiles import ADVICE
from ingot.base.storage import atomic_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    6: np.dtype("float64"),
    7: np.dtype("float32"),
    8: np.dtype("uint16"),
}
UINT16_BELOW = 65_500
AGAIN = "run `ingot prepare --again`"
BLOCK_BITS = 12


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype of a token column: uint16 for a vocabulary below 65,500, else int32, as in
    Megatron.
    """
    return np.dtype("uint16" if vocab_size < UINT16_BELOW else "int32")


def column_prefix(folder: Path, split: str, column: str, number: int) -> Path:
    """The path of part `number` of a column, without the extensions of its two files."""
    return folder / f"{split}.{column}-{number:05d}"


def split_of(path: str) -> str:
    """The split of a column's file."""
    return path.partition(".")[0]


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


class ColumnWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`; both appear whole when the block ends without an error,
    the index last.

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
        """Append records: their concatenated elements, and the length of each."""
        self._stream.write(np.ascontiguousarray(flat, self.dtype).data)
        self._lengths.frombytes(np.ascontiguousarray(lengths, np.int32).tobytes())
        self.elements += len(flat)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """Reads one part, memory-mapped: opening it and finding a record cost the same for a thousand
    records and a billion.

    Opening reads only a few numbers of the index. Each block of it is validated when first used, so
    a damaged index gives an error and never a wrong record.

    Raises:
        WrongInput: a file is missing, is no index of this version, or the two files do not match.
        Failed: this process or machine has too many files open.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = _mapped(idx_path(prefix))
        if len(index) < HEADER.size:
            raise WrongInput(f"{idx_path(prefix)} is cut short at {len(index)} bytes; {AGAIN}")
        magic, version, code, self.records, self.documents = HEADER.unpack_from(index)
        if magic != MAGIC or version != VERSION or code not in CODES:
            raise WrongInput(
                f"{idx_path(prefix)} is not a Megatron index of version {VERSION}; {AGAIN}"
            )
        self.dtype = CODES[code]
        self._shift = self.dtype.itemsize.bit_length() - 1
        expected = HEADER.size + 12 * self.records + 8 * self.documents
        if self.records and len(index) == expected + self.records:
            raise WrongInput(
                f"{idx_path(prefix)} has a mode for each sequence (Megatron's multimodal layout),"
                " which cannot be read; use text columns"
            )
        if len(index) != expected:
            raise WrongInput(
                f"{idx_path(prefix)} has {len(index)} bytes, its header says {expected}; {AGAIN}"
            )
        lengths_end, pointers_end = HEADER.size + 4 * self.records, HEADER.size + 12 * self.records
        self._lengths = (
            np.frombuffer(index, "<i4", self.records, HEADER.size)
            if self.records
            else np.zeros(0, np.int32)
        )
        self._pointers = (
            np.frombuffer(index, "<i8", self.records, lengths_end)
            if self.records
            else np.zeros(0, np.int64)
        )
        self._documents = (
            np.frombuffer(index, "<i8", self.documents, pointers_end)
            if self.documents
            else np.zeros(0, np.int64)
        )
        # The 34-byte header leaves the pointers unaligned. NumPy's searchsorted would copy all of
        # them at each call; a memoryview reads single ones at any alignment.
        self._bisected = memoryview(index)[lengths_end:pointers_end].cast("q")
        self._counted = memoryview(index)[HEADER.size : lengths_end].cast("i")
        self._sound = bytearray((self.records >> BLOCK_BITS) + 1)
        self._open_data()

    def _open_data(self) -> None:
        data = _mapped(bin_path(self.prefix))
        self._size = len(data)
        size = (
            int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
            if self.records
            else 0
        )
        if self._size != size or size % self.dtype.itemsize:
            raise WrongInput(
                f"{bin_path(self.prefix)} has {self._size} bytes, its index says {size}; {AGAIN}"
            )
        if not self.documents or (self._documents[0], self._documents[-1]) != (0, self.records):
            raise self._contradiction()
        self._elements = np.frombuffer(data, self.dtype)

    def __len__(self) -> int:
        """Records, which Megatron calls sequences."""
        return int(self.records)

    @property
    def elements(self) -> int:
        return len(self._elements)

    def __getitem__(self, record: int) -> npt.NDArray[Any]:
        """The elements of one record, a view of the file."""
        self._prove(record, record + 1)
        begin = int(self._pointers[record]) // self.dtype.itemsize
        return self._elements[begin : begin + int(self._lengths[record])]

    def slice(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Elements `begin` to `end` of all records concatenated, a view of the file."""
        return self._elements[begin:end]

    def lengths(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """The lengths of the records `first` to `last`, a view of the file."""
        self._prove(first, last)
        return self._lengths[first:last]

    def begin(self, record: int) -> int:
        """The offset of `record` in the stream of elements; for the number of records, the end of
        the stream.
        """
        if record == self.records:
            return self.elements
        self._prove(record, record + 1)
        return self._bisected[record] // self.dtype.itemsize

    def span(self, record: int) -> tuple[int, int]:
        """The offset of `record` in the stream of elements, and its length.

        Raises:
            WrongInput: there is no such record.
        """
        if not 0 <= record < self.records:
            raise WrongInput(
                f"{idx_path(self.prefix)} has {self.records:,} records, number {record:,} is asked"
                f" for; {AGAIN}"
            )
        if not self._sound[record >> BLOCK_BITS]:
            self._prove_block(record >> BLOCK_BITS)
        return self._bisected[record] >> self._shift, self._counted[record]

    def starts(self, begin: int, end: int) -> list[int]:
        """The ascending offsets between `begin` and `end` of the stream at which records begin,
        found by bisection.
        """
        first = bisect.bisect_left(self._bisected, begin << self._shift)
        # Usually few records begin there: the end is near, and its pointers are in memory already.
        last, step = first, 16
        while last < self.records and self._bisected[last] < end << self._shift:
            near, last, step = last, min(last + step, self.records), step * 4
            last = bisect.bisect_left(self._bisected, end << self._shift, near, last)
        # A wrong pointer leads the bisection to itself, so it lies within the range validated here.
        self._prove(max(first - 1, 0), min(last + 1, self.records))
        return [pointer >> self._shift for pointer in self._bisected[first:last]]

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """How many records each of Megatron's documents has; one each in columns written here.
        Reads the whole index.
        """
        counts: npt.NDArray[np.int64] = np.diff(self._documents)
        if len(counts) and counts.min() < 0:
            raise self._contradiction()
        return counts

    def prove(self) -> None:
        """Validate the whole index. Raises WrongInput if it is inconsistent."""
        self._prove(0, len(self))
        self.document_lengths()

    def _prove(self, first: int, last: int) -> None:
        """Validate the blocks of the index that hold records `first` to `last`, if not done yet."""
        for block in range(first >> BLOCK_BITS, ((max(last, first + 1) - 1) >> BLOCK_BITS) + 1):
            if not self._sound[block]:
                self._prove_block(block)

    def _prove_block(self, block: int) -> None:
        """Check that every record begins where the previous one ends, and the last one ends with
        the file.
        """
        first, last = block << BLOCK_BITS, min((block + 1) << BLOCK_BITS, len(self))
        lengths = self._lengths[first:last]
        after = self._pointers[first + 1 : last + 1]
        ends = self._pointers[first:last] + lengths.astype(np.int64) * self.dtype.itemsize
        begins_right = first > 0 or not last or self._pointers[0] == 0
        if (
            not begins_right
            or (lengths < 0).any()
            or (ends[: len(after)] != after).any()
            or (len(after) < len(ends) and ends[-1] != self._size)
        ):
            raise self._contradiction()
        self._sound[block] = 1

    def _contradiction(self) -> WrongInput:
        return WrongInput(
            f"{idx_path(self.prefix)} contradicts itself about where records lie; it is damaged,"
            f" {AGAIN}"
        )


def _mapped(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as stream:
            # An empty file cannot be mapped.
            return (
                mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                if path.stat().st_size
                else b""
            )
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing; {AGAIN}") from None
    except OSError as error:
        if error.errno in ADVICE:
            raise Failed(f"{path} cannot be opened: {ADVICE[error.errno]}") from error
        raise WrongInput(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error
