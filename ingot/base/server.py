"""A temporary `ingot serve` process: started, queried and always stopped again."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypedDict

from ingot.base.environment import RESOLVED_VARIABLE
from ingot.base.errors import Failed, WrongInput, one_line
from ingot.base.lazy import lazy_import
from ingot.base.processes import preexec_die_with_parent

if TYPE_CHECKING:
    import ssl

    import httpx
else:  # imported only when a server is actually asked
    httpx, ssl = lazy_import("httpx"), lazy_import("ssl")

_LISTENS = re.compile(r"^serving .+ at (http://\S+)")
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@contextlib.contextmanager
def running_server(command: Sequence[str]) -> Iterator[str]:
    """Start `command` and yield the address of its server once it is healthy. The command says all:
    variables and `.env` set no knobs of the server.

    The server is stopped at the end of the block, and by the kernel if this process is killed.

    Raises:
        Failed: it ended, or did not listen in time.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIP_")}
    environment[RESOLVED_VARIABLE] = "1"
    process = subprocess.Popen(
        list(command),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=preexec_die_with_parent(),
    )
    try:
        assert process.stderr is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_relay, args=(process.stderr, lines), daemon=True).start()
        url = _address(process, lines)
        _wait_for_health(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except BaseException:  # it hangs, or a second Ctrl-C: no server may be left behind
            process.kill()
            process.wait()
            raise


def ask(
    url: str, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Any:
    """The server's answer, parsed from JSON.

    Raises:
        WrongInput: as `certificates`.
        Failed: it does not answer or refuses.
    """
    try:
        response = httpx.post(
            f"{url}{route}",
            json=body,
            headers=headers,
            timeout=ANSWER_TIMEOUT_S,
            **environment_for(url),
        )
    except httpx.HTTPError as error:
        raise Failed(
            f"the server at {url} did not answer ({type(error).__name__}: {error}); run the same"
            " command again"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise Failed(
            f"the server answered {response.status_code} on {route}:"
            f" {one_line(response.text)}; mend `serve` in the recipe"
        )
    try:
        return response.json()
    except ValueError as error:
        raise Failed(
            f"the server at {url} answered no JSON on {route} ({one_line(response.text, 80)}); see"
            " what listens there"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ClientEnvironment(TypedDict):
    """As httpx has them."""

    trust_env: bool
    verify: ssl.SSLContext


def environment_for(url: str) -> ClientEnvironment:
    """What a client of the server at `url` takes of the environment: the certificates that
    $SSL_CERT_FILE names, and the proxy of $HTTP_PROXY unless the server is this machine's. None can
    reach that, and it would read what that is asked.

    Raises:
        WrongInput: as `certificates`.
    """
    own = is_loopback(httpx.URL(url).host)
    return {"trust_env": not own, "verify": certificates(url)}


def certificates(*urls: str) -> ssl.SSLContext:
    """What a client of `urls` trusts: those that $SSL_CERT_FILE names or the usual ones; none if no
    address is https, since to read them takes longer than most questions.

    Raises:
        WrongInput: it names no file of certificates.
    """
    if not any(url.lower().startswith("https:") for url in urls):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:  # one of ssl, too
        raise WrongInput(
            f"$SSL_CERT_FILE names {os.environ.get('SSL_CERT_FILE')}, which is no file of"
            " certificates; mend or unset it"
        ) from error


def _relay(stream: IO[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    """Copy the server's messages to our stderr line by line, and to the queue in which its address
    is awaited.
    """
    for line in stream:
        text = line.decode(errors="replace")
        print(text, end="", file=sys.stderr, flush=True)
        lines.put(text)
    lines.put(None)


def _address(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[str | None]) -> str:
    deadline, last = time.monotonic() + START_TIMEOUT_S, ""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=min(left, 0.5))
            if line is None:
                raise Failed(
                    f"the server ended before it listened (exit {process.wait()}): {last.strip()}"
                )
            if match := _LISTENS.match(line):
                return match[1]
            last = line
    raise Failed(
        f"the server did not listen within {START_TIMEOUT_S:g} s; try `ingot serve` with the same"
        " recipe"
    )


def _wait_for_health(process: subprocess.Popen[bytes], url: str) -> None:
    deadline, environment = time.monotonic() + START_TIMEOUT_S, environment_for(url)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"the server ended (exit {process.returncode}); its message stands above")
        with contextlib.suppress(httpx.HTTPError):
            if any(
                httpx.get(f"{url}{route}", timeout=5.0, **environment).status_code == httpx.codes.OK
                for route in ("/health", "/v2/health/ready")
            ):
                return  # /v2/health/ready is Triton's
        time.sleep(0.05)
    raise Failed(
        f"the server at {url} was not ready within {START_TIMEOUT_S:g} s; try `ingot serve` with"
        " the same recipe"
    )
