"""A page of a run as a browser sees it, and a process that holds a run."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOLD = """
import sys, time
from pathlib import Path
from ingot.base.runfolder import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


class Page(HTMLParser):
    """The page as a browser reads it: elements, ids, attributes, text; refuses tags that do not
    match.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.tags: set[str] = set()
        self.ids: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def paths(self) -> list[str]:
        return [value for tag, name, value in self.attributes if (tag, name) == ("path", "d")]


def check_harmless(page: Page) -> None:
    """Nothing is fetched, nothing is run."""
    assert not page.tags & {
        "script",
        "iframe",
        "object",
        "embed",
        "img",
        "form",
        "base",
        "video",
        "audio",
    }
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in (
            "src",
            "href",
            "srcset",
            "action",
            "xlink:href",
            "data",
            "poster",
            "background",
        ):
            own_file = tag == "a" and re.fullmatch(r"examples/[^/:]+\.parquet", value)
            assert value.startswith("data:") or own_file, (tag, name, value)
        if name == "style":
            assert "url(" not in value
    style = page.source.split("<style>", 1)[1].split("</style>", 1)[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in page.source
