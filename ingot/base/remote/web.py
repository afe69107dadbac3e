"""Web servers as a storage, through fsspec: the client, patience with servers that are busy, and
what is there. Of other storages it knows how a request of theirs goes by a proxy.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast
from urllib.request import getproxies

from ingot.base.errors import Failed, one_line
from ingot.base.server import is_loopback

PAUSES_S = (1.0, 2.0, 4.0)
"""Before each further try at a web server that is busy or broke off; clients of buckets try again
by themselves.
"""
SILENCE_S = 60.0
"""For how long a web server may send nothing. The client by itself limits the whole answer."""

_NOTHING_THERE = re.compile(
    r"(javascript|mailto):|.*\?(C=[NMSD](;|&|&amp;)O=[AD]|sort=\w+&(amp;)?order=(asc|desc))"
)
"""Links of a folder's page to nothing in it: what a browser does, and the page itself in another
order, as Apache, nginx and Caddy link it.
"""

T = TypeVar("T")


async def web_client(**options: Any) -> Any:
    """The client of web servers: it asks the proxy that $HTTP_PROXY names, and a file may take as
    long as it comes.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    usual = {"trust_env": True, "timeout": timeout, "request_class": _request}
    return aiohttp.ClientSession(**{**usual, **options})


def bucket_request(method: str, url: Any, **about: Any) -> Any:
    """A request of gcsfs, by the proxy that $HTTPS_PROXY names. The client would ask it with
    `trust_env`, and then read ~/.netrc, too: a login for all hosts there and the token of a bucket
    in one request are an error to it.
    """
    from aiohttp.helpers import get_env_proxy_for_url

    with contextlib.suppress(LookupError):
        about["proxy"], about["proxy_auth"] = get_env_proxy_for_url(url)
    return _request(method, url, **about)


def _request(
    method: str, url: Any, *, proxy: Any = None, proxy_auth: Any = None, **about: Any
) -> Any:
    """In place of aiohttp's own class: no proxy can reach a server of this machine, and one may be
    written without its scheme, as other clients allow (`HTTPS_PROXY=HOST:PORT`). Before 3.12, which
    other packages may ask for, a session takes no middlewares.
    """
    import aiohttp
    from aiohttp.helpers import strip_auth_from_url

    if is_loopback(url.host or ""):
        proxy = None
    elif proxy is not None and not proxy.host:
        # Read anew: of what it takes for a path the client undoes the escapes, as in a password.
        written = getproxies().get(url.scheme, str(proxy))
        proxy, proxy_auth = strip_auth_from_url(type(url)(f"http://{written}"))
    return aiohttp.ClientRequest(method, url, proxy=proxy, proxy_auth=proxy_auth, **about)


def is_web(filesystem: Any) -> bool:
    return "http" in filesystem.protocol


def patiently(filesystem: Any, name: str, act: Callable[[], T]) -> T:
    """What `act` asks of a file or folder; a web server that is busy is asked again.

    Raises:
        Failed: it is busy, or breaks off, each time.
    """
    pauses = iter(PAUSES_S)
    while True:
        try:
            return act()
        except Exception as error:  # the client passes on whatever its transport raises
            # To the client a file that it cannot ask about is not there.
            said = (isinstance(error, FileNotFoundError) and error.__cause__) or error
            if not is_web(filesystem) or not _may_pass(said):
                raise
            if (pause := next(pauses, None)) is None:
                raise Failed(
                    f"{name} is busy or breaks off ({one_line(said)}); run the same command again"
                ) from error
        time.sleep(pause)


def exists(filesystem: Any, name: str) -> bool:
    """Whether there is such a file or folder. A server that is busy does not say that there is
    none, though its client takes it so.

    Raises:
        Failed: as `patiently`.
    """
    if not is_web(filesystem):
        return bool(filesystem.exists(name))
    try:
        patiently(filesystem, name, lambda: filesystem.info(name))
    except FileNotFoundError:
        return False
    return True


def files_at(filesystem: Any, name: str) -> list[str]:
    """The files of a folder with those of its folders, or the file of this name; [] where there is
    neither, or no server.

    Raises:
        Failed: as `patiently`.
    """
    if not is_web(filesystem):
        return cast("list[str]", filesystem.find(name))
    try:
        if not _may_list(filesystem, name):
            return [name]
        linked = {each for each in _linked(filesystem, name) if not _is_folder(each)}
    except OSError:
        return []
    return sorted(linked) or ([name] if exists(filesystem, name) else [])


def named_like(filesystem: Any, pattern: str) -> dict[str, bool]:
    """The files and folders that a glob names, folders alone where it ends in `/`; of each, whether
    it is a folder. Of a web server it matches what the client's own glob does, which leaves out a
    folder that does not answer.

    Raises:
        Failed: as `patiently`.
    """
    if not is_web(filesystem):
        found = filesystem.glob(pattern, detail=True)
        return {name: about["type"] == "directory" for name, about in found.items()}
    from fsspec.utils import glob_translate

    magic = re.search(r"[*[]", pattern)  # a `?` begins the query
    if magic is None:
        return {}
    # Of `**/` all that is in the folders below counts, as it does of `**`.
    of_folders = _is_folder(pattern) and not pattern.endswith("**/")
    pattern = pattern.rstrip("/")
    start = pattern.rindex("/", 0, magic.start()) + 1
    depth = math.inf if "**" in pattern else pattern.count("/", start) + 1
    like = re.compile(glob_translate(_without_scheme(pattern)))
    return {
        name: _is_folder(name)
        for name in _linked(filesystem, pattern[:start], depth)
        if like.match(_without_scheme(name).rstrip("/")) and (_is_folder(name) or not of_folders)
    }


def _linked(filesystem: Any, page: str, depth: float = math.inf) -> Iterator[str]:
    """The files and folders that the page of a folder links to, and what is in those folders, so
    many levels deep. The client's own walk leaves out a folder that does not answer.
    """
    try:
        links = patiently(filesystem, page, lambda: filesystem.ls(page, detail=False))
    except FileNotFoundError:
        return
    below = len(_without_scheme(page).rstrip("/")) + 1
    for link in links:
        # The client tells the page's own address, maybe of the other scheme, and the link below it.
        start = len(link) - len(_without_scheme(link)) + below
        rest = link[start:].partition("#")[0]
        path, mark, query = rest.partition("?")
        name = posixpath.normpath(path.lstrip("/"))
        if path.rpartition("/")[2] in ("", ".", ".."):
            name = "" if name == "." else f"{name}/"
        if name.startswith("../") or not (name or mark) or _NOTHING_THERE.match(rest):
            continue
        there = f"{link[:start]}{name}{mark}{query}"
        yield there
        if _is_folder(there) and depth > 1:
            yield from _linked(filesystem, there, depth - 1)


def _may_list(filesystem: Any, name: str) -> bool:
    """Whether an address may be that of a folder. Of one without an ending `/` the server tells;
    asked for the links of a text that it names no type of, the client would read all of it.
    """
    if _is_folder(name):
        return True
    try:
        about = patiently(filesystem, name, lambda: filesystem.info(name))
    except FileNotFoundError:
        return True  # what is asked for the links says why
    return bool(about.get("mimetype") == "text/html" or _is_folder(about["url"]))


def _is_folder(name: str) -> bool:
    return name.endswith("/") and "?" not in name


def _without_scheme(address: str) -> str:
    return address.partition("://")[2]


def _may_pass(error: BaseException) -> bool:
    """Whether a web server is busy, or broke off. One that is not reached at all is told at once:
    its address may be wrong.
    """
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):
        return error.status == 429 or error.status >= 500
    if isinstance(error, aiohttp.ClientConnectorError):
        return False
    broke_off = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
    return isinstance(error, broke_off)
