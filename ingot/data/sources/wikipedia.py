"""Wikipedia dumps: finding and downloading one, and its articles as plain text.

A dump is MediaWiki's XML export, read as a stream. Only pages of the article namespace that are not
redirects are kept; a page's row is its page id, and its text begins with its title.
"""

from __future__ import annotations

import bz2
import functools
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import Progress, say
from ingot.base.runfolder import lock_in_turn
from ingot.base.storage import disk_errors, fsync_folder
from ingot.base.userfolders import cache_folder
from ingot.config.sections.data import SourceSettings
from ingot.data.documents import records as items
from ingot.data.documents.records import EMPTY, BadRecord, ParsedDocument, checked
from ingot.data.sources.compressed import pieces
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.source_file import SourceFile, recall, remember

SERVER = "https://dumps.wikimedia.org"
SERVER_VARIABLE = "WIKIPEDIA_DUMPS"
"""Environment variable with the address of a mirror."""
DOWNLOAD_CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60
TRIES = 5
PAUSE_S = 1.0
"""Before a download goes on that broke off; twice that after each try that got no further."""


def find_dump(source: SourceSettings, knob: str) -> SourceFile:
    """The dump that `wikipedia:LANG[:DATE]` names; its path is the download's destination.

    Raises:
        WrongInput: the language or date is invalid, or the server has no such dump.
        Failed: the server cannot be reached, and never was for this source.
    """
    match = re.fullmatch(r"wikipedia:([a-z][a-z-]*)(?::(\d{8}|latest))?", source.source)
    if not match:
        raise WrongInput(
            f"{knob} {source.source}: write it as wikipedia:LANG or wikipedia:LANG:YYYYMMDD, such"
            " as wikipedia:en"
        )
    wiki, date = match[1].replace("-", "_") + "wiki", match[2] or "latest"
    name = f"{wiki}-{date}-pages-articles-multistream.xml.bz2"
    url = f"{os.environ.get(SERVER_VARIABLE) or SERVER}/{wiki}/{date}/{name}"
    try:
        stamp = _stamp(url, f"{knob} {source.source}")
        remember(url, stamp)
    except Failed:
        stamp = recall(url)
        if stamp is None:
            raise
        say(
            f"warning: the dump server cannot be reached; {source.source} is taken to be as it was"
            " when it last was"
        )
    path = cache_folder() / "wikipedia" / fingerprint(stamp) / name
    return SourceFile(str(path), name, "wikipedia", {**stamp, "path": source.source})


def _stamp(url: str, place: str) -> dict[str, Any]:
    """Size and version of the file at `url`."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S
        ) as answer:
            size = int(answer.headers.get("Content-Length") or 0)
            found = {"url": url, "bytes": size, "tag": _version(answer)}
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise WrongInput(
                f"{place}: {url} is not there; see {url.rsplit('/', 2)[0]}/ for the dates that are"
            ) from error
        raise Failed(
            f"{place}: {url} answers {error.code} {error.reason}; try again later"
        ) from error
    except (OSError, HTTPException) as error:
        raise Failed(
            f"{place}: {url} cannot be reached ({error}); check the network, or give the path of a"
            " dump at hand"
        ) from error
    if not size:
        raise Failed(
            f"{place}: {url} does not tell its size, by which a whole download is known; check the"
            f" network, or name another server in ${SERVER_VARIABLE}"
        )
    return found


def _version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _size(answer: Any) -> int:
    """The size of the whole file, also where only the rest of it comes."""
    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return int(whole if whole.isdigit() else answer.headers.get("Content-Length") or 0)


def fetch_dump(file: SourceFile) -> None:
    """Download a dump to `file.path`, unless it is there; an interrupted download is resumed.

    Raises:
        Failed: the connection broke several times without progress, the file is not the one that
            was found any more, or the disk is full.
    """
    target = Path(file.path)
    if _is_whole(file, target):
        return
    folder, waiting = target.parent, f"waiting for another process that fetches {file.name}"
    # Two would write into one file.
    with lock_in_turn(folder.parent, f"{folder.name}.lock", waiting):
        if not _is_whole(file, target):
            _fetch_whole(file, target)


def _is_whole(file: SourceFile, target: Path) -> bool:
    return target.is_file() and target.stat().st_size == file.bytes


def _fetch_whole(file: SourceFile, target: Path) -> None:
    partial, size = target.with_name(target.name + ".partial"), file.bytes
    with disk_errors(target):
        partial.parent.mkdir(parents=True, exist_ok=True)
    have = furthest = partial.stat().st_size if partial.exists() else 0
    tries = 0
    with Progress(
        f"fetch {file.name}", total=size // 10**6, unit="MB", done=have // 10**6
    ) as progress:
        while have < size:
            broken = _fetch(file, partial, have, progress)
            have = partial.stat().st_size if partial.exists() else 0
            # A server without ranges begins anew each time: only what is further is progress.
            tries, furthest = 0 if have > furthest else tries + 1, max(have, furthest)
            if have < size and tries >= TRIES:
                raise Failed(
                    f"{file.stamp['url']} broke off at {have:,} of {size:,} bytes ({broken}); run"
                    " the same command again to go on"
                )
            if have < size:
                time.sleep(PAUSE_S * 2**tries)
    if have > size:
        raise _changed(file, partial)
    with disk_errors(target):
        os.replace(partial, target)
        fsync_folder(target.parent)


def _changed(file: SourceFile, partial: Path) -> Failed:
    partial.unlink(missing_ok=True)
    return Failed(f"{file.stamp['url']} changed while it was fetched; run the same command again")


def _fetch(file: SourceFile, partial: Path, have: int, progress: Progress) -> str:
    """Download from byte `have` on. Returns what interrupted it.

    Raises:
        Failed: the server has another version, of another size.
    """
    headers = (
        {"Range": f"bytes={have}-", "If-Range": file.stamp["tag"]}
        if have and file.stamp["tag"]
        else {}
    )
    try:
        with urllib.request.urlopen(
            urllib.request.Request(file.stamp["url"], headers=headers), timeout=TIMEOUT_S
        ) as answer:
            goes_on, version = answer.status == 206, _version(answer)
            if version and version != file.stamp["tag"]:
                if _size(answer) != file.bytes:
                    raise _changed(file, partial)
                # Of a mirror, each server may tag the same file by itself.
                return "another version came"
            if not goes_on and version != file.stamp["tag"]:
                return "something else came, perhaps of a network that wants to be logged in to"
            with disk_errors(partial), partial.open("ab" if goes_on else "wb") as stream:
                have = have if goes_on else 0
                while chunk := answer.read(DOWNLOAD_CHUNK_BYTES):
                    stream.write(chunk)
                    have += len(chunk)
                    progress.update(have // 10**6)
                stream.flush()
                os.fsync(stream.fileno())
        return "the connection ended"
    except (OSError, HTTPException) as error:
        return str(error)


READ_CHUNK_BYTES = 1 << 16
DROPPED_TAGS = frozenset({"ref", "table", "gallery", "math", "timeline", "score", "imagemap"})
# The File and Category namespaces; a wiki's localised names for them are in the dump's header.
DROPPED_NAMESPACES = {"6": "file", "14": "category"}


def pages(chunks: Iterable[bytes], *, whole: bool = True) -> Iterator[ParsedDocument | BadRecord]:
    """The articles of an uncompressed dump, given in chunks of any size. `whole` False: its end may
    be missing.

    Raises:
        WrongInput: the package that parses wikitext is not installed.
    """
    plain, row = _plain_text(), 0
    dropped = {"file", "image", "category"}
    try:
        for element in _elements(chunks, whole=whole):
            if _tag(element) == "namespace":
                if element.get("key") in DROPPED_NAMESPACES and element.text:
                    dropped.add(element.text.casefold())
                continue
            row = int(_text(element, "id") or 0)
            if _text(element, "ns") in ("", "0") and element.find("{*}redirect") is None:
                yield _article(row, element, functools.partial(plain, dropped=dropped))
    except (ParseError, ValueError) as error:
        detail = f"after page {row}: {str(error)[:120]}"
        yield BadRecord(row + 1, "broken XML", detail, ends_file=True)


def multistream(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """The decompressed header of a multistream dump, then the content of `size` bytes that begin at
    one of its streams.

    Each stream of such a file holds some whole pages; the first one is the header, with the names
    of namespaces.
    """
    begin = stream.tell()
    if begin:
        stream.seek(0)
        yield from _first_stream(stream)
        stream.seek(begin)
    decompressor, pending = bz2.BZ2Decompressor(), b""
    while chunk := pending or stream.read(min(READ_CHUNK_BYTES, size)):
        size -= len(chunk) if not pending else 0
        yield from pieces(decompressor, chunk)
        pending = decompressor.unused_data
        if decompressor.eof:
            decompressor = bz2.BZ2Decompressor()
        elif size <= 0:
            raise EOFError("the file ends within a stream")


def _first_stream(stream: IO[bytes]) -> Iterator[bytes]:
    decompressor = bz2.BZ2Decompressor()
    while not decompressor.eof and (chunk := stream.read(READ_CHUNK_BYTES)):
        yield from pieces(decompressor, chunk)


def _elements(chunks: Iterable[bytes], *, whole: bool) -> Iterator[Element]:
    """Every complete `namespace` and `page` element of the dump, freed after use. Raises ValueError
    where one, or what stands between two of them, is larger than a document may be.
    """
    parser: XMLPullParser[Element] = XMLPullParser(("start", "end"))
    parents, held = list[Element](), 0
    for chunk in chunks:
        held += len(chunk)
        if held > items.LARGEST_BYTES:
            raise ValueError(f"no page ends within {items.LARGEST_BYTES:,} bytes")
        parser.feed(chunk)
        for element in _finished(parser, parents):
            yield element
            held = 0
    if whole:
        parser.close()
        yield from _finished(parser, parents)


def _finished(parser: XMLPullParser[Element], parents: list[Element]) -> Iterator[Element]:
    for event, element in cast("Iterator[tuple[str, Element]]", parser.read_events()):
        if event == "start":
            parents.append(element)
            continue
        parents.pop()
        if _tag(element) in ("namespace", "page"):
            yield element
            if parents:
                parents[-1].remove(element)


def _article(row: int, page: Element, plain: Callable[[str], str]) -> ParsedDocument | BadRecord:
    title, wikitext = _text(page, "title"), _text(page, "revision/{*}text")
    try:
        text = plain(wikitext)
    except (RecursionError, ValueError) as error:
        return BadRecord(row, "broken wikitext", f"{title}: {str(error)[:80]}")
    return checked(row, f"{title}\n\n{text}") if text else BadRecord(row, EMPTY, title)


def _text(element: Element, path: str) -> str:
    return element.findtext("{*}" + path) or ""


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _plain_text() -> Callable[..., str]:
    """(wikitext, dropped namespaces) -> text without templates, tables, references, images and
    markup.
    """
    try:
        import mwparserfromhell
        from mwparserfromhell import nodes
    except ImportError as error:
        raise WrongInput(
            "a Wikipedia dump needs a package that is not installed; pip install 'ingot[wikipedia]'"
        ) from error

    def text_of(code: Any, dropped: set[str]) -> str:
        return (
            "".join(
                [
                    node.value if type(node) is nodes.Text else said(node, dropped)
                    for node in code.nodes
                ]
            )
            if code is not None
            else ""
        )

    def said(node: Any, dropped: set[str]) -> str:
        if isinstance(node, nodes.Wikilink):
            # A leading colon links to such a page rather than embedding it or adding a category.
            if str(node.title).partition(":")[0].strip().casefold() in dropped:
                return ""
            return text_of(node.text if node.text is not None else node.title, dropped).lstrip(":")
        if isinstance(node, nodes.Tag):
            name = str(node.tag).strip().lower()
            if name == "br":
                return "\n"
            return "" if name in DROPPED_TAGS else text_of(node.contents, dropped)
        if isinstance(node, nodes.HTMLEntity):
            return str(node.normalize())
        if isinstance(node, nodes.Heading | nodes.ExternalLink):
            return text_of(node.title, dropped)
        return str(node) if isinstance(node, nodes.Text) else ""

    def plain(wikitext: str, dropped: set[str]) -> str:
        text = re.sub(r"__[A-Z]+__", "", text_of(mwparserfromhell.parse(wikitext), dropped))
        return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]*\n[ \t]*", "\n", text)).strip()

    return plain


class WikipediaSource(SourceKind):
    """`wikipedia:LANG[:DATE]`: a dump, downloaded into the user's cache folder and read there."""

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        return [find_dump(source, knob)]

    def fetch(self, file: SourceFile) -> None:
        fetch_dump(file)
