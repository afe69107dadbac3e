"""Web servers as a storage, through fsspec: the client, patience with servers that are busy, and
what is there. Of other storages it knows how a request of theirs goes by a proxy.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast
from urllib.parse import urljoin

from ingot.base.errors import Failed, one_line
from ingot.base.server import is_loopback

PAUSES_S = (1.0, 2.0, 4.0)
"""Before each further try at a web server that is busy or broke off; clients of buckets try again
by themselves.
"""
SILENCE_S = 60.0
"""For how long a web server may send nothing. The client by itself limits the whole answer."""

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


def _request(method: str, url: Any, *, proxy: Any = None, **about: Any) -> Any:
    """In place of aiohttp's own class: no proxy can reach a server of this machine. Before 3.12,
    which other packages may ask for, a session takes no middlewares.
    """
    import aiohttp

    proxy = None if is_loopback(url.host or "") else proxy
    return aiohttp.ClientRequest(method, url, proxy=proxy, **about)


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
        linked = sorted(set(_linked(filesystem, name)))
    except OSError:
        return []
    return linked or ([name] if exists(filesystem, name) else [])


def _linked(filesystem: Any, page: str) -> Iterator[str]:
    """The files that the page of a folder links to, and those of its folders. The client's own walk
    leaves out a folder that does not answer.
    """
    try:
        links = patiently(filesystem, page, lambda: filesystem.ls(page, detail=False))
    except FileNotFoundError:
        return
    for link in links:
        if not _is_page(link):
            yield link
        elif (folder := urljoin(link, ".")).rpartition("/")[0].startswith(f"{page.rstrip('/')}/"):
            yield from _linked(filesystem, folder)


def named_like(filesystem: Any, pattern: str) -> dict[str, dict[str, Any]]:
    """The files and folders that a glob names, with what is known of each.

    Raises:
        Failed: as `patiently`.
    """
    found = patiently(filesystem, pattern, lambda: filesystem.glob(pattern, detail=True))
    return {
        name: about
        for name, about in found.items()
        if about["type"] == "directory" or not (is_web(filesystem) and _is_page(name))
    }


def _is_page(link: str) -> bool:
    """Whether a link leads to the page of a folder. Those of Apache link to themselves, in other
    orders (`?C=M;O=A`), which the client takes for files.
    """
    return re.split(r"[?#]", link, maxsplit=1)[0].endswith("/")


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
