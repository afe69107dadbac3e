"""Articles out of a dump: which pages, what text, in flat memory, and how damage is told."""

from __future__ import annotations

import bz2
import io
import tracemalloc
from pathlib import Path

import pytest

from ingot.data import ingest as ingest_module
from ingot.data.documents import records as items
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.ingest import ingest
from ingot.data.raw import ingest_tasks as blocks
from ingot.data.raw.store import open_raw
from ingot.data.sources import wikipedia
from ingot.data.sources.compressed import LARGEST_PIECE
from ingot.data.sources.wikipedia import multistream, pages
from tests.data.small import everything, recipe
from tests.data.test_ingest import documents
from tests.lazy import require

require("mwparserfromhell", reason="mwparserfromhell is not installed")

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo><sitename>Wikipedia</sitename><namespaces>
    <namespace key="0" case="first-letter" /><namespace key="6" case="first-letter">Datei</namespace>
    <namespace key="14" case="first-letter">Kategorie</namespace></namespaces></siteinfo>
"""
ARTICLE = """{{Infobox Ort|name=Kupfer|{{nested}}}}'''Kupfer''' ist ein [[Metall|chemisches Element]].<ref name="a">Quelle, S. 3</ref>
[[Datei:Kupfer.jpg|thumb|Ein [[Barren]] Kupfer]]

== Gewinnung ==
Es wird [https://example.org abgebaut] und ''geschmolzen''.
{| class="wikitable"
! Jahr !! Menge
|-
| 1990 || 5
|}
* Ein Punkt &amp;ndash; mehr
__NOTOC__
[[Kategorie:Metall]]"""


def page(number: int, title: str, text: str, ns: int = 0, extra: str = "") -> str:
    escaped = text.replace("<", "&lt;").replace(">", "&gt;")
    return (
        f"  <page><title>{title}</title><ns>{ns}</ns><id>{number}</id>{extra}\n<revision><id>{number * 7}</id>"
        f'<text bytes="1" xml:space="preserve">{escaped}</text></revision></page>\n'
    )


def dump(*made: str) -> bytes:
    return (HEAD + "".join(made) + "</mediawiki>\n").encode()


SMALL = dump(
    page(12, "Kupfer", ARTICLE),
    page(13, "Cu", "#REDIRECT [[Kupfer]]", extra='<redirect title="Kupfer" />'),
    page(14, "Diskussion:Kupfer", "Hm.", 1),
    page(15, "Leer", "{{nur eine Vorlage}}"),
    page(16, "Zinn &amp; Zink", "Beide sind Metalle."),
)


def read(data: bytes) -> list[ParsedDocument | BadRecord]:
    return list(pages([data[:500], data[500:]]))


def test_articles_become_plain_text() -> None:
    items = read(SMALL)
    assert [item.row for item in items] == [12, 15, 16]
    first = items[0]
    assert isinstance(first, ParsedDocument)
    assert (
        first.text
        == "Kupfer\n\nKupfer ist ein chemisches Element.\n\nGewinnung\nEs wird abgebaut und"
        " geschmolzen.\n\nEin Punkt – mehr"
    )
    assert items[1] == BadRecord(15, "empty text", "Leer")
    assert items[2] == ParsedDocument(16, "Zinn & Zink\n\nBeide sind Metalle.")


@pytest.mark.parametrize(
    "name", ["dewiki-20260101-pages-articles.xml", "dewiki-latest-pages-articles1.xml-p1p500.bz2"]
)
def test_a_dump_at_hand(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(bz2.compress(SMALL) if name.endswith(".bz2") else SMALL)
    small = recipe(tmp_path, tmp_path / name)
    ingest(small)
    assert list(documents(small.folder.raw)) == [f"{name}:12", f"{name}:16"]


def test_a_multistream_dump_is_read_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SMALLEST_BYTES", 3000)
    monkeypatch.setattr(ingest_module, "ALONE_BYTES", 0)
    made = [
        page(
            number,
            f"Seite {number}",
            f"{'Ein Satz. ' * (number % 50)} {number * 7919**9:x} [[Datei:Bild.jpg|mini]]",
        )
        for number in range(1, 401)
    ]
    streams = [
        HEAD,
        *("".join(made[first : first + 10]) for first in range(0, 400, 10)),
        "</mediawiki>\n",
    ]
    path = tmp_path / "dewiki-latest-pages-articles-multistream.xml.bz2"
    path.write_bytes(b"".join(bz2.compress(stream.encode()) for stream in streams))
    found = {}
    for workers in (1, 2):
        small = recipe(tmp_path, path, data__engine__workers=workers)
        ingest(small)
        found[workers] = everything(small.folder.raw)
        articles = documents(small.folder.raw)
    assert found[1] == found[2]
    assert len(found[1]) > 4, "several parts"
    assert list(articles) == [f"{path.name}:{number}" for number in range(1, 401)]
    assert not any("Datei" in text for text in articles.values()), (
        "each block knows the names of namespaces"
    )
    path.write_bytes(path.read_bytes()[:-500])
    small = recipe(tmp_path, path, data__engine__workers=1, data__on_bad="skip_files")
    ingest(small)
    assert set(open_raw(small).splits["train"][0].bad) == {"broken compression"}
    assert len(documents(small.folder.raw)) > 380


def test_a_few_bytes_of_a_dump_that_stand_for_many_are_read_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, rest = (bz2.compress(bytes(1 << 23)) for _ in range(2))
    stream = io.BytesIO(head + rest)
    stream.seek(len(head))
    pieces = list(map(len, multistream(stream, len(rest))))
    assert sum(pieces) == 1 << 24
    assert max(pieces) <= LARGEST_PIECE
    monkeypatch.setattr(items, "LARGEST_BYTES", 10_000)
    chunks = [b"<mediawiki>", page(1, "Zinn", "Ein Satz.").encode(), b"<page><a>"]
    found, bad = pages([*chunks, *[b"a" * 3000] * 5])
    assert isinstance(found, ParsedDocument)
    assert isinstance(bad, BadRecord)
    assert bad.detail == "after page 1: no page ends within 10,000 bytes"


def test_a_dump_of_any_name_by_its_format(tmp_path: Path) -> None:
    (tmp_path / "dump.xml").write_bytes(SMALL)
    small = recipe(tmp_path, {"source": str(tmp_path / "dump.xml"), "format": "wikipedia"})
    ingest(small)
    assert len(documents(small.folder.raw)) == 2


def test_damage_is_told_and_what_stands_before_is_read() -> None:
    for data in (SMALL[: len(SMALL) * 4 // 5], SMALL.replace(b"<title>Zinn", b"<title><Zinn")):
        items = read(data)
        assert isinstance(items[0], ParsedDocument)
        assert isinstance(items[-1], BadRecord)
        assert items[-1].reason == "broken XML"
    assert [item.reason for item in read(b"no XML at all") if isinstance(item, BadRecord)] == [
        "broken XML"
    ]
    assert [item.reason for item in read(b"") if isinstance(item, BadRecord)] == ["broken XML"]


def test_memory_stays_flat() -> None:
    made = dump(*(page(number, f"Seite {number}", "Ein Satz. " * 2000) for number in range(1, 400)))
    tracemalloc.start()
    count = sum(1 for _ in pages(made[at : at + 65536] for at in range(0, len(made), 65536)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 399
    assert len(made) > 7_000_000
    assert peak < 3_000_000


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mwparserfromhell", None)
    with pytest.raises(wikipedia.WrongInput, match=r"pip install 'ingot\[wikipedia\]'"):
        read(SMALL)
