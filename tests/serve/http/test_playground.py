"""`GET /`: the page on which the served model is tried."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.tokenizers.bpe import MASK
from tests.browser import Tab, browsing, require_browser
from tests.loopback import Loopback
from tests.patience import PATIENCE_S
from tests.serve.running import Running, running
from tests.serve.test_masks import make_masked
from tests.serve.tiny import make_classifier, make_scorer
from tests.ui.serving import showing

STOP = "document.querySelector('.ask button').textContent"


def test_the_page_and_its_files_are_served_without_the_key(strict: Running) -> None:
    with httpx.Client(base_url=strict.url, timeout=PATIENCE_S) as client:
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


@pytest.mark.drawn("a page that asks")
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


BOX = "document.querySelector('.ask textarea')"


def overheard(tab: Tab) -> None:
    """Keeps what is sent from now on as `window.sent`."""
    tab.eval(
        "(real => { window.sent = []; window.fetch = (url, options) => {"
        " if (options?.body) sent.push(JSON.parse(options.body)); return real(url, options); }; })(fetch)"
    )


@pytest.mark.parametrize("leave", ["Clear", "Completion"])
def test_what_was_cleared_while_it_was_written_is_not_sent_again(
    leave: str, tab: Tab, server: Running
) -> None:
    tab.go("about:blank")
    tab.go(f"{server.url}/")
    tab.wait("document.querySelector('.panel-head') !== null")
    overheard(tab)
    choose(tab, "max_tokens", "8000")
    ask(tab, "on and on")
    tab.wait("document.querySelector('.turn.assistant')?.textContent.length > 12")
    buttons = "[...document.querySelectorAll('.play-bar button')]"
    tab.eval(f"{buttons}.find(b => b.innerText === '{leave}').click()")
    tab.wait(f"{STOP} === 'Send'")
    assert "Nothing asked yet" in tab.text(".talk")
    assert tab.text(".panel-foot") == ""
    tab.eval(f"{buttons}.find(b => b.innerText === 'Chat').click()")
    choose(tab, "max_tokens", "3")
    ask(tab, "the fox")
    tab.wait(f"{STOP} === 'Send' && document.querySelector('.panel-foot').innerText !== ''")
    assert tab.eval("sent.at(-1).messages") == [{"role": "user", "content": "the fox"}]
    assert "Nothing asked yet" not in tab.text(".talk")


def test_an_emptied_knob_is_the_servers_own(tab: Tab, server: Running) -> None:
    tab.go("about:blank")
    tab.go(f"{server.url}/")
    tab.wait("document.querySelector('.panel-head') !== null")
    overheard(tab)
    complete(tab)
    for knob in ("max_tokens", "temperature", "top_p"):
        choose(tab, knob, "")
    ask(tab, "the fox")
    tab.wait(f"{STOP} === 'Send' && document.querySelector('.panel-foot').innerText !== ''")
    assert "16 tokens" in tab.text(".panel-foot")
    assert tab.eval("Object.keys(sent.at(-1)).sort()") == [
        "model",
        "prompt",
        "stream",
        "stream_options",
    ]


def test_enter_that_ends_a_word_of_an_input_method_sends_nothing(tab: Tab, server: Running) -> None:
    tab.go("about:blank")
    tab.go(f"{server.url}/")
    tab.wait("document.querySelector('.panel-head') !== null")
    overheard(tab)
    choose(tab, "max_tokens", "3")

    def enter(more: str) -> str:
        return f"{BOX}.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'Enter', {more} }}))"

    tab.eval(f"{BOX}.value = 'にほ'")
    tab.eval(f"{enter('isComposing: true')} && {enter('keyCode: 229')}")
    tab.eval(f"{BOX}.value = '日本'")
    tab.eval(enter(""))
    tab.wait(f"{STOP} === 'Send' && document.querySelector('.panel-foot').innerText !== ''")
    asked = tab.eval("sent.map(one => one.messages[0].content)")
    assert asked == ["日本"]


class Dying(BaseHTTPRequestHandler):
    """A model that hangs up in the middle of its answer (`torn`), after a part of it (`early`) or
    before it (`none`).
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        model = {"id": "dying", "chat": True, "tasks": ["chat"]}
        self._begin("application/json")
        self._chunk(json.dumps({"data": [model]}))
        self._chunk("")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["messages"][-1]["content"]
        self._begin("text/event-stream")
        if prompt != "none":
            self._chunk('data: {"choices": [{"delta": {"content": "begun"}}]}\n\n')
        self._chunk('data: {"cho') if prompt == "torn" else self._chunk("")
        self.close_connection = True

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


def test_an_answer_that_broke_off_is_no_whole_one(tab: Tab, tmp_path: Path) -> None:
    with Loopback(Dying) as model, showing(tmp_path, "--model", model.address) as shown:
        torn = {"messages": [{"role": "user", "content": "torn"}]}
        with httpx.Client(base_url=shown.url, timeout=PATIENCE_S, trust_env=False) as client:
            last = client.post("/api/models/0/chat", json=torn).text.split("\n\n")[-2]
        assert "broke off (RemoteProtocolError)" in json.loads(last.removeprefix("data: "))["error"]
        tab.go(f"{shown.url}/#/play")
        for prompt in ("torn", "early"):
            tab.go("about:blank")
            tab.go(f"{shown.url}/#/play")
            ask(tab, prompt)
            tab.wait(
                "document.querySelector('.panel-foot .error')?.innerText.includes('broke off')"
            )
            assert tab.text(".turn.assistant") == "begun"
        tab.wait(f"{STOP} === 'Send'")
        ask(tab, "none")
        tab.wait(f"{STOP} === 'Send' && {BOX}.value === 'none'")
        assert tab.eval("document.querySelectorAll('.turn').length") == 2, "as if never asked"
        assert "broke off" in tab.text(".panel-foot")


CHAT = [{"role": "user", "content": "the fox?"}]
ANSWERS = ["it jumps", "no idea"]


def shares(tab: Tab) -> list[tuple[str, float]]:
    """What stands beside each other in the rows of an answer, shares of a hundred as such."""
    rows = tab.eval(
        "[...document.querySelectorAll('.share')].map(row => [...row.children].map(c => c.textContent))"
    )
    return [
        (name, float(number.removesuffix(" %")) / (100 if "%" in number else 1))
        for name, number in rows
    ]


def best_first(found: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(found.items(), key=lambda one: -one[1])


@pytest.mark.drawn("a page that asks")
@pytest.mark.parametrize(
    ("make", "mode", "asked", "instances"),
    [
        (make_classifier, "Classes", "the quick fox", ["the quick fox"]),
        (make_masked, "Masks", f"the quick {MASK} fox", [f"the quick {MASK} fox"]),
        (
            make_scorer,
            "Score",
            "\n---\n".join([CHAT[0]["content"], *ANSWERS]),
            [{"messages": [*CHAT, {"role": "assistant", "content": one}]} for one in ANSWERS],
        ),
    ],
)
def test_what_writes_no_text_is_asked_for_what_it_tells(
    make: Callable[[Path], Path],
    mode: str,
    asked: str,
    instances: list[Any],
    tab: Tab,
    tmp_path: Path,
) -> None:
    with running(make(tmp_path / "model")) as made:
        with made.client() as client:
            told = client.post("/predict", json={"instances": instances}).json()["predictions"]
        if mode == "Masks":
            expected = {choice["token_str"]: choice["score"] for choice in told[0]["masks"][0]}
        elif mode == "Score":
            expected = {
                answer: next(iter(one["scores"].values()))
                for answer, one in zip(ANSWERS, told, strict=True)
            }
        else:
            expected = told[0]["scores"]
        tab.go("about:blank")
        tab.go(f"{made.url}/")
        ask(tab, asked.replace("\n", "\\n"))
        tab.wait("document.querySelectorAll('.share').length > 0")
        assert tab.text(".play-bar .segmented").splitlines()[0] == mode
        assert not tab.eval("document.querySelector('.play-bar > button').checkVisibility()")
        found = shares(tab)
        assert [name for name, _ in found] == [name for name, _ in best_first(expected)]
        assert [number for _, number in found] == pytest.approx(
            [number for _, number in best_first(expected)], abs=1e-3
        )
        assert tab.complaints == []


def test_texts_are_compared_by_their_vectors(tab: Tab, server: Running) -> None:
    tab.go("about:blank")
    tab.go(f"{server.url}/")
    likeness = (
        "[...document.querySelectorAll('.segmented button')].find(b => b.innerText === 'Likeness')"
    )
    tab.wait(f"{likeness} !== undefined")
    tab.eval(f"{likeness}.click()")
    texts = ["the fox", "the dog", "five wizards"]
    ask(tab, "\\n".join(texts))
    cells = tab.wait(
        "(c => c.length === 9 && c.map(one => Number(one.textContent)))"
        "([...document.querySelectorAll('.like')])"
    )
    with server.client() as client:
        body = {"input": texts}
        data = client.post("/v1/embeddings", json=body).json()["data"]
    vectors = [one["embedding"] for one in data]
    expected = [
        sum(a * b for a, b in zip(one, other, strict=True)) for one in vectors for other in vectors
    ]
    assert cells == pytest.approx(expected, abs=6e-3)


KEYS = "document.querySelectorAll('.panel-head input[type=password]')"


def type_key(tab: Tab, panel: int, key: str) -> None:
    tab.eval(
        f"(key => {{ key.value = '{key}'; key.dispatchEvent(new Event('change')); }})({KEYS}[{panel}])"
    )


def test_a_key_goes_to_the_address_that_it_was_typed_for_and_no_further(
    tab: Tab, server: Running, strict: Running
) -> None:
    tab.go("about:blank")
    tab.go(f"{strict.url}/")
    tab.wait(f"{KEYS}[0]?.checkVisibility()")
    tab.eval(
        "(real => { window.asked = []; window.fetch = (url, options) => {"
        " asked.push([url, options.headers.Authorization ?? null]); return real(url, options); };"
        f" window.prompt = () => '{server.url}/'; window.alert = () => null; }})(fetch)"
    )
    type_key(tab, 0, "ours")
    tab.wait("window.asked.length === 1")
    tab.eval(
        "(models => { models.value = 'other'; models.dispatchEvent(new Event('change')); })"
        "(document.querySelector('.panel-head select'))"
    )
    tab.wait("window.asked.length === 2")
    assert tab.eval("window.asked") == [
        [f"{strict.url}/v1/models", "Bearer ours"],
        [f"{server.url}/v1/models", None],
    ]


def test_two_models_answer_beside_each_other_in_the_ui(
    tab: Tab, server: Running, strict: Running, tmp_path: Path
) -> None:
    with showing(tmp_path, "--model", server.url, "--model", strict.url) as shown:
        tab.go(f"{shown.url}/#/play")
        tab.wait("document.querySelector('.panel-card') !== null")
        choose(tab, "max_tokens", "5")
        tab.eval("[...document.querySelectorAll('.play-bar > button')][1].click()")
        assert tab.eval(f"[...{KEYS}].map(key => key.checkVisibility())") == [False, True]
        # The second look at the model, with the key, takes longer than the answers.
        tab.eval(
            "(real => { window.held = []; window.fetch = async (url, options) => {"
            " if (held && /models.\\d+$/.test(url)) await new Promise(go => held.push(go));"
            " return real(url, options); }; })(fetch)"
        )
        type_key(tab, 1, "wrong")
        ask(tab, "the fox")
        tab.wait("document.querySelectorAll('.panel-foot')[1].innerText !== ''")
        tab.wait(f"{STOP} === 'Send' && document.querySelectorAll('.panel-card').length === 2")
        tab.eval("window.before = document.querySelectorAll('.panel-head select')[1]")
        tab.eval("held.forEach(go => go()), window.held = null")
        tab.wait("!before.isConnected")
        one, other = (
            tab.eval(f"document.querySelectorAll('.panel-foot')[{number}].innerText")
            for number in (0, 1)
        )
        assert "5 tokens" in one
        assert "API key" in other
        type_key(tab, 1, "söme key")
        head = "document.querySelectorAll('.panel-head')[1].innerText"
        tab.wait(f"!{head}.includes('needs its API key') && !{head}.includes('does not answer')")
        model = "document.querySelectorAll('.panel-head select')[1].selectedOptions[0].textContent"
        assert tab.eval(model) == "tiny", "not the address, by which none is served there"
        ask(tab, "the fox")
        tab.wait("document.querySelectorAll('.panel-foot')[1].innerText.includes('5 tokens')")
        with httpx.Client(base_url=shown.url, timeout=PATIENCE_S, trust_env=False) as client:
            assert client.post("/api/models/2/chat", json={}).status_code == 404
            assert client.post("/api/models/0/metrics", json={}).status_code == 422
            refused = client.post(
                "/api/models/0/chat", json={}, headers={"Origin": "http://evil.example"}
            )
            assert refused.status_code == 403
