"""What web servers hold, asked by the real client of servers that are busy now and then."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.base.listing import find_files
from ingot.base.remote.web import files_at, named_like, web_client
from ingot.base.storage import is_file, open_read
from tests.lazy import lazy, require
from tests.loopback import Loopback

require("aiohttp", reason="aiohttp is not installed")
aiohttp, fsspec = lazy("aiohttp"), lazy("fsspec")

DATA = b"data"
UP = '<a href="?C=M;O=A">Last modified</a> <a href="/">Parent</a>'
PAGES = {
    "/d/": f'{UP} <a href="a.txt">a</a> <a href="b.txt">b</a> <a href="c/">c</a>',
    "/d/c/": f'{UP} <a href="/d/">d</a> <a href="e.txt">e</a>',
}
"""As Apache writes them."""


class Web(Loopback):
    """Serves `pages` and `data` as the files that they link to; is busy with the requests whose
    number `is_busy` says so of, and hangs up where it is asked for what `broken` begins.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.pages, self.data = dict(PAGES), DATA
        self.kind: str | None = "text/plain"
        self.page_kind: str | None = "text/html"
        self.has_head, self.redirects = True, False
        self.is_busy: Callable[[int], bool] = lambda number: False
        self.broken = "nothing"
        self.asked: list[str] = []
        self.logins: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.server.logins.append(self.headers["Proxy-Authorization"])
        path = self.path.partition("?")[0]
        pages = self.server.pages
        page = pages.get(path, pages.get(f"{path}/"))
        if path.startswith(self.server.broken):
            self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif self.server.is_busy(len(self.server.asked) - 1):
            self._answer(503, "text/plain", b"busy")
        elif self.command == "HEAD" and not self.server.has_head:
            self._answer(405, "text/plain", b"")
        elif page is not None and self.server.redirects and not path.endswith("/"):
            self._answer(301, "text/plain", b"")
        elif page is not None:
            self._answer(200, self.server.page_kind, page.encode())
        elif path.endswith(("/a.txt", "/b.txt", "/e.txt")):
            self._answer(200, self.server.kind, self.server.data)
        else:
            self._answer(404, "text/plain", b"")

    do_GET = do_HEAD

    def _answer(self, code: int, kind: str | None, data: bytes) -> None:
        self.send_response(code)
        if code == 301:
            self.send_header("Location", f"{self.path}/")
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr("ingot.base.remote.web.PAUSES_S", (0.0, 0.0))
    server = Web()
    yield server
    server.server_close()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("d", ["a.txt", "b.txt", "c/e.txt"]),
        ("d/b.txt", ["b.txt"]),
        ("d/a.txt?key=1", ["a.txt?key=1"]),
        ("d/*.txt", ["a.txt", "b.txt"]),
        ("d/*", ["a.txt", "b.txt", "c/e.txt"]),
        ("d/**", ["a.txt", "b.txt", "c/e.txt"]),
        ("d/*/*.txt", ["c/e.txt"]),
        ("d/**/*.txt", ["a.txt", "b.txt", "c/e.txt"]),
        ("d/[bc]*", ["b.txt", "c/e.txt"]),
        ("d/*/", ["c/e.txt"]),
        ("d/[c]/", ["c/e.txt"]),
        ("d/**/", ["a.txt", "b.txt", "c/e.txt"]),
        ("d/none.txt", []),
    ],
)
def test_a_server_that_is_busy_for_a_moment_has_what_it_has(
    web: Web, pattern: str, found: list[str]
) -> None:
    def asked(is_busy: Callable[[int], bool]) -> list[str]:
        web.is_busy = is_busy
        web.asked.clear()
        return [name.partition("/d/")[2] for name in find_files(f"{web.address}/{pattern}")]

    assert asked(lambda number: False) == found
    for busy in range(len(web.asked)):
        assert asked(busy.__eq__) == found
        with pytest.raises(Failed, match=r"is busy or breaks off \(503.*; run the same command"):
            asked(busy.__le__)


@pytest.mark.parametrize("pattern", ["d", "d/*", "d/*/*.txt", "d/**/*.txt"])
def test_a_folder_that_breaks_off_is_not_left_out(web: Web, pattern: str) -> None:
    web.broken = "/d/c"
    with pytest.raises(Failed, match=r"/d/c/ is busy or breaks off \(.*reset"):
        find_files(f"{web.address}/{pattern}")


def test_a_glob_asks_for_no_folder_below_its_last_part(web: Web) -> None:
    find_files(f"{web.address}/d/*.txt")
    assert not [path for path in web.asked if path.startswith("/d/c")]


@pytest.mark.parametrize("folder", ["/d", "//d", "//d/", "/x/../d", "/d/./"])
@pytest.mark.parametrize("rest", ["", "/**/*.txt"])
def test_an_address_may_be_spelled_in_several_ways(web: Web, folder: str, rest: str) -> None:
    web.pages |= {f"/{path}": page for path, page in PAGES.items()}
    found = find_files(f"{web.address}{folder.rstrip('/') if rest else folder}{rest}")
    names = [name.removeprefix(web.address + folder).lstrip("/") for name in found]
    assert names == ["a.txt", "b.txt", "c/e.txt"]


def test_a_page_may_link_to_its_folders_by_https(web: Web) -> None:
    def plain(method: str, url: Any, **about: Any) -> Any:
        return aiohttp.ClientRequest(method, url.with_scheme("http"), **about)

    client = {"get_client": web_client, "client_kwargs": {"request_class": plain}}
    filesystem = fsspec.filesystem("http", **client, skip_instance_cache=True)
    secure = web.address.replace("http", "https")
    web.pages["/d/"] = f'<a href="a.txt">a</a> <a href="{secure}/d/c/">c</a>'
    files = [f"{web.address}/d/a.txt", f"{secure}/d/c/e.txt"]
    assert files_at(filesystem, f"{web.address}/d") == files
    assert list(named_like(filesystem, f"{web.address}/d/*/*.txt")) == files[1:]


def test_links_as_caddy_writes_them(web: Web) -> None:
    """No part of a name is then a dot, by which a file would count as hidden."""
    web.pages["/d/"] = (
        '<a href="../">Up</a> <a href="./?sort=size&order=desc">Size</a> <a href="./">.</a>'
        """<a href="javascript:queryParam('layout', '')">List</a> <a href="#top">Top</a>"""
        '<a href="./a.txt">a</a> <a href="./a.txt#end">a</a> <a href="./c/">c</a>'
    )
    web.pages["/d/c/"] = '<a href="../">Up</a> <a href="../b.txt">b</a> <a href="./e.txt">e</a>'
    files = [f"{web.address}/d/{name}" for name in ("a.txt", "c/e.txt")]
    for pattern in ("d", "d/", "d/*", "d/**/*.txt"):
        assert find_files(f"{web.address}/{pattern}") == files


def test_a_query_may_name_a_file(web: Web) -> None:
    web.pages["/d/"] = f'{UP} <a href="?f=a.txt">a</a> <a href="get/?f=b/">b</a>'
    files = [f"{web.address}/d/{name}" for name in ("?f=a.txt", "get/?f=b/")]
    assert find_files(f"{web.address}/d") == files
    assert find_files(f"{web.address}/d/*a.txt") == files[:1]


def test_a_file_of_no_known_type_is_not_asked_for_links(web: Web) -> None:
    """That would read all of it, and a link in its text would make it a folder."""
    web.kind, web.data = None, b'<a href="e.txt">e</a>'
    for name in ("d/a.txt", "d/a.txt?of=/"):
        assert find_files(f"{web.address}/{name}") == [f"{web.address}/{name}"]
    assert set(web.asked) == {"/d/a.txt", "/d/a.txt?of=/"}


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(
    ("redirects", "kind"), [(False, "text/html"), (True, "text/html"), (True, None)]
)
def test_a_folder_needs_no_slash_at_the_end(
    web: Web, has_head: bool, redirects: bool, kind: str | None
) -> None:
    web.has_head, web.redirects, web.page_kind = has_head, redirects, kind
    assert find_files(f"{web.address}/d/c") == [f"{web.address}/d/c/e.txt"]


def test_a_busy_server_is_asked_again_whether_there_is_a_file(web: Web) -> None:
    web.is_busy = (3).__gt__
    assert is_file(f"{web.address}/d/a.txt")
    assert not is_file(f"{web.address}/d/none.txt")


@pytest.mark.parametrize("login", ["", "me:%40%3A@"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_proxy_of_the_network_is_asked(
    web: Web, monkeypatch: pytest.MonkeyPatch, scheme: str, login: str
) -> None:
    address = web.address.removeprefix("http://")
    monkeypatch.setenv("http_proxy", f"{scheme}{login}{address}")
    monkeypatch.setenv("no_proxy", "")
    with open_read("http://data.example.test/a.txt") as stream:
        assert stream.read() == DATA
    assert set(web.asked) == {"http://data.example.test/a.txt"}
    basic = f"Basic {base64.b64encode(b'me:@:').decode()}"
    assert set(web.logins) == {basic if login else None}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_asked_for_a_server_of_this_machine(
    web: Web, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    proxy = Web()
    monkeypatch.setenv("http_proxy", proxy.address)
    monkeypatch.setenv("no_proxy", "")
    with open_read(f"{web.address.replace('127.0.0.1', host)}/d/a.txt") as stream:
        assert stream.read() == DATA
    assert (set(web.asked), proxy.asked) == ({"/d/a.txt"}, [])
    proxy.server_close()


def test_a_client_before_middlewares_will_do(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    session = aiohttp.ClientSession.__init__

    def before(self: Any, *args: Any, **options: Any) -> None:
        """As of aiohttp 3.11."""
        assert "middlewares" not in options
        session(self, *args, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "__init__", before)
    filesystem = fsspec.filesystem("http", get_client=web_client, skip_instance_cache=True)
    assert filesystem.cat_file(f"{web.address}/d/a.txt") == DATA
