"""Articles out of a Wikipedia dump: XML as MediaWiki exports it, streamed, its wikitext turned into
plain text.

Pages of the article namespace that are no redirects; a page's row is its page id, its text begins
with its title.
"""

from __future__ import annotations

import bz2
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from ingot.base.errors import WrongInput
from ingot.data.items import Bad, Item, checked

CHUNK_BYTES = 1 << 16
DROPPED_TAGS = frozenset({"ref", "table", "gallery", "math", "timeline", "score", "imagemap"})
# File and Category; a wiki's own names for them stand in the dump's head.
DROPPED_NAMESPACES = {"6": "file", "14": "category"}


def pages(chunks: Iterable[bytes], *, whole: bool = True) -> Iterator[Item | Bad]:
    """The articles of an uncompressed dump, given in pieces of any size. Not `whole`: its end may
    be missing.

    Raises:
        WrongInput: the package that reads wikitext is not installed.
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
        yield Bad(
            row + 1,
            "broken XML",
            f"after page {row}: {str(error)[:120]}; the rest of the file is not read",
        )


def multistream(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """What `size` bytes of a multistream dump hold, from a beginning of one of its streams on,
    after the dump's head.

    Each stream of such a file holds some whole pages; the first one is the head, with the names of
    namespaces.
    """
    begin = stream.tell()
    if begin:
        stream.seek(0)
        yield _decompress_one(stream)
        stream.seek(begin)
    decompressor, pending = bz2.BZ2Decompressor(), b""
    while chunk := pending or stream.read(min(CHUNK_BYTES, size)):
        size -= len(chunk) if not pending else 0
        yield decompressor.decompress(chunk)
        pending = decompressor.unused_data
        if decompressor.eof:
            decompressor = bz2.BZ2Decompressor()
        elif size <= 0:
            raise EOFError("the file ends within a stream")


def _decompress_one(stream: IO[bytes]) -> bytes:
    decompressor, found = bz2.BZ2Decompressor(), b""
    while not decompressor.eof and (chunk := stream.read(CHUNK_BYTES)):
        found += decompressor.decompress(chunk)
    return found


def _elements(chunks: Iterable[bytes], *, whole: bool) -> Iterator[Element]:
    """Every `namespace` and `page` of the dump, complete; none is kept."""
    parser: XMLPullParser[Element] = XMLPullParser(("start", "end"))
    parents = list[Element]()
    for chunk in chunks:
        parser.feed(chunk)
        yield from _finished(parser, parents)
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


def _article(row: int, page: Element, plain: Callable[[str], str]) -> Item | Bad:
    title, wikitext = _text(page, "title"), _text(page, "revision/{*}text")
    try:
        text = plain(wikitext)
    except (RecursionError, ValueError) as error:
        return Bad(row, "broken wikitext", f"{title}: {str(error)[:80]}")
    return checked(row, f"{title}\n\n{text}") if text else Bad(row, "empty text", title)


def _text(element: Element, path: str) -> str:
    return element.findtext("{*}" + path) or ""


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _plain_text() -> Callable[..., str]:
    """(wikitext, dropped namespaces) -> text without templates, tables, references, pictures and
    marks.
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
            # A page of these is linked, rather than shown or put into a category, with a colon
            # before it.
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
