"""`GET /`: the page on which the served model is tried."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.browser import Tab, browsing, require_browser
from tests.serve.running import Running
from tests.ui.serving import showing

STOP = "document.querySelector('.ask button').textContent"


def test_the_page_and_its_files_are_served_without_the_key(strict: Running) -> None:
    with httpx.Client(base_url=strict.url, timeout=60) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        files = re.findall(r'(?:href|src)="(playground/[^"]+)"', page.text)
        assert len(files) == 3
        for name in (*files, "playground/dom.js", "playground/playground.js"):
            answer = client.get(f"/{name}")
            assert answer.status_code == 200, name
            kind = answer.headers["content-type"]
            assert ("javascript" if name.endswith(".js") else "text/css") in kind
        assert client.get("/v1/models").status_code == 401
        assert client.get("/playground/__init__.py").status_code in (401, 404)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    require_browser()
    with browsing() as opened:
        opened.look(1280)
        yield opened


def ask(tab: Tab, prompt: str) -> None:
    tab.wait(
        "!document.querySelector('.ask button').disabled && document.querySelector('.talk') !== null"
    )
    tab.eval(f"document.querySelector('.ask textarea').value = '{prompt}'")
    tab.click(".ask button")


def choose(tab: Tab, knob: str, value: str) -> None:
    tab.eval(
        f"(() => {{ const i = document.querySelector('[name={knob}]'); i.value = '{value}';"
        " i.dispatchEvent(new Event('change')); })()"
    )


def complete(tab: Tab) -> None:
    """The model has a chat template, so the page begins with a chat."""
    buttons = "[...document.querySelectorAll('.play-bar button')]"
    tab.wait(
        f"{buttons}.find(b => b.getAttribute('aria-pressed') === 'true')?.innerText === 'Chat'"
    )
    tab.eval(f"{buttons}.find(b => b.innerText === 'Completion').click()")


def test_a_completion_is_streamed_coloured_and_copied(
    tab: Tab, server: Running, tmp_path: Path
) -> None:
    tab.go(f"{server.url}/")
    tab.wait("document.querySelector('.panel-head').innerText.includes('tiny')")
    complete(tab)
    choose(tab, "max_tokens", "20")
    choose(tab, "temperature", "0")
    tab.eval("document.querySelector('[name=logprobs]').click()")
    ask(tab, "the fox")
    tab.wait(f"{STOP} === 'Send' && document.querySelectorAll('.token').length === 20")
    assert "20 tokens" in tab.text(".panel-foot")
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 20, "temperature": 0}
    with server.client() as client:
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    said = tab.eval("document.querySelector('.turn').textContent")
    assert said == f"the fox{expected}"
    tab.eval("document.querySelector('.token').dispatchEvent(new PointerEvent('pointerenter'))")
    assert "%" in tab.text(".tops")
    # What is copied runs as it is, and gives the same answer.
    tab.eval(
        "(() => { window.copied = []; Object.defineProperty(navigator, 'clipboard', { value:"
        " { writeText: async (text) => { window.copied.push(text); } } }); })()"
    )
    tab.eval("[...document.querySelectorAll('.grow button')].slice(0, 2).forEach(b => b.click())")
    curl, python = tab.wait("window.copied.length === 2 && window.copied")
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
    assert expected[:10] in done.stdout.encode().decode("unicode_escape") or expected in done.stdout
    (tmp_path / "copied.py").write_text(python)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "copied.py")], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"{expected}\n"
    assert tab.complaints == []


def test_stop_ends_the_work_of_the_model(tab: Tab, server: Running) -> None:
    tab.go("about:blank")
    tab.go(f"{server.url}/")
    tab.wait("document.querySelector('.panel-head') !== null")
    complete(tab)
    choose(tab, "max_tokens", "8000")
    ask(tab, "on and on")
    tab.wait("document.querySelector('.turn')?.textContent.length > 12")
    assert tab.eval(STOP) == "Stop"
    tab.click(".ask button")
    tab.wait(f"{STOP} === 'Send'")
    assert "stopped" in tab.text(".panel-foot")
    server.wait_for("ingot_running", 0)


def test_two_models_answer_beside_each_other_in_the_ui(
    tab: Tab, server: Running, strict: Running, tmp_path: Path
) -> None:
    with showing(tmp_path, "--model", server.url, "--model", strict.url) as shown:
        tab.go(f"{shown.url}/#/play")
        tab.wait("document.querySelector('.play-bar input[type=password]').checkVisibility()")
        tab.eval("document.querySelector('.panel-card').dataset.old = '1'")
        tab.eval(
            "(() => { const i = document.querySelector('.play-bar input[type=password]');"
            " i.value = 'wrong'; i.dispatchEvent(new Event('change')); })()"
        )
        tab.wait("document.querySelector('.panel-card:not([data-old])') !== null")
        choose(tab, "max_tokens", "5")
        tab.eval("[...document.querySelectorAll('.play-bar > button')][1].click()")
        ask(tab, "the fox")
        tab.wait(f"{STOP} === 'Send' && document.querySelectorAll('.panel-card').length === 2")
        one, other = (
            tab.eval(f"document.querySelectorAll('.panel-foot')[{number}].innerText")
            for number in (0, 1)
        )
        assert "5 tokens" in one
        assert "API key" in other
        with httpx.Client(base_url=shown.url, timeout=60, trust_env=False) as client:
            assert client.post("/api/models/2/chat", json={}).status_code == 404
            assert client.post("/api/models/0/metrics", json={}).status_code == 422
            refused = client.post(
                "/api/models/0/chat", json={}, headers={"Origin": "http://evil.example"}
            )
            assert refused.status_code == 403
