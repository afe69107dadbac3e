"""The pages in a real browser: what is clicked, dragged and typed, at two sizes and in both
colours.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.reports import read_report
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line
from ingot.registry.local import LocalRegistry
from ingot.report.page import write_page
from tests.browser import Tab, browsing, require_browser
from tests.report.made_up import made_up_run
from tests.ui.conftest import runs_folder
from tests.ui.serving import Shown, showing


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    require_browser()
    with browsing() as opened:
        yield opened


@pytest.fixture(autouse=True)
def a_wide_light_window(tab: Tab) -> Iterator[None]:
    tab.look(1280)
    tab.go("about:blank")
    yield
    assert tab.complaints == []


def names(tab: Tab) -> list[str]:
    return list(tab.eval("[...document.querySelectorAll('.who a')].map(a => a.textContent)"))


@pytest.mark.drawn("runs in a browser")
def test_the_table_sorts_filters_and_leads_to_curves(tab: Tab, shown: Shown) -> None:
    tab.go(f"{shown.url}/")
    tab.wait("document.querySelectorAll('tr[data-id]').length === 4")
    assert tab.eval("document.querySelector('.tab[aria-current=page]').dataset.tab") == "runs"
    tab.click("th[data-key=bits] button")
    assert names(tab).index("second") < names(tab).index("first")
    tab.click("th[data-key=bits] button")
    assert names(tab).index("first") < names(tab).index("second")
    tab.click(".segmented button:nth-child(3)")
    assert names(tab) == ["failed"]
    tab.click(".segmented button:nth-child(1)")
    tab.eval(
        "(() => { const i = document.querySelector('input[type=search]'); i.value = 'SEC';"
        " i.dispatchEvent(new Event('input')); })()"
    )
    assert names(tab) == ["second"]
    tab.eval(
        "(() => { const i = document.querySelector('input[type=search]'); i.value = '';"
        " i.dispatchEvent(new Event('input')); })()"
    )
    assert not tab.eval("document.querySelector('.actions').checkVisibility()")
    for name in ("first", "second"):
        tab.click(f"tr[data-id={name}] input")
    assert "2 chosen" in tab.text(".actions")
    tab.click(".actions .main")
    tab.wait("document.querySelectorAll('.chart canvas').length >= 12")
    assert "first" in tab.text(".legend")
    assert "name" in tab.text("#differences")
    tab.wait("document.querySelector('#figures').innerText.includes('2.2')")


def drawn(tab: Tab, selector: str = ".chart canvas") -> int:
    """Pixels of a canvas that are not empty."""
    return int(
        tab.eval(
            f"(() => {{ const c = document.querySelector({json.dumps(selector)});"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
        )
    )


def test_curves_zoom_and_tell_their_values(tab: Tab, shown: Shown) -> None:
    tab.go(f"{shown.url}/#/run?run=first")
    tab.wait("document.querySelectorAll('.chart canvas').length >= 12")
    tab.wait(
        "(() => { const c = document.querySelector('.chart canvas'); return c.width > 300; })()"
    )
    assert drawn(tab) > 500
    tab.eval(
        "(() => { const c = document.querySelector('.chart'), b = c.getBoundingClientRect();"
        " c.dispatchEvent(new PointerEvent('pointermove',"
        " { clientX: b.left + b.width / 2, clientY: b.top + 40 })); })()"
    )
    tab.wait("document.querySelector('.tip').checkVisibility()")
    assert 3 < float(tab.eval("document.querySelector('.tip b').textContent")) < 9
    back = "[...document.querySelectorAll('.controls > button')][0]"
    assert not tab.eval(f"{back}.checkVisibility()")
    tab.drag(".chart", 0.3, 0.6)
    tab.wait(f"{back}.checkVisibility()")
    tab.eval(f"{back}.click()")
    tab.wait(f"!{back}.checkVisibility()")
    for axis in (2, 3, 1):
        tab.click(f".controls .segmented button:nth-child({axis})")
        tab.wait("document.querySelectorAll('.chart canvas').length >= 12")


@contextlib.contextmanager
def lone_chart(tab: Tab, shown: Shown, options: str) -> Iterator[None]:
    """A page with `window.chart` in `#lone`, whose last zoom is `window.zoomed`."""
    tab.go(f"{shown.url}/")
    tab.eval(
        "import('/static/chart.js').then(({ Chart }) => { const root = document.createElement('div');"
        " root.id = 'lone'; root.style.width = '600px'; root.style.height = '200px';"
        " document.body.replaceChildren(root);"
        " window.chart = new Chart(root, { zoom: (...range) => { window.zoomed = range; } });"
        " chart.set([{ name: 'a', index: 0, x: [0, 0.4, 1], y: [1, 0, 2], n: 3, lost: null }],"
        f" {{ formatX: String, ...{options} }}); }})"
    )
    tab.wait("window.chart?.box")
    yield
    tab.go("about:blank")


@pytest.mark.parametrize(("axis", "whole"), [("time", False), ("step", True), ("tokens", True)])
def test_a_part_of_a_second_can_be_chosen_and_no_part_of_a_step(
    tab: Tab, shown: Shown, axis: str, whole: bool
) -> None:
    with lone_chart(tab, shown, f"{{ axis: '{axis}' }}"):
        tab.drag("#lone", 0.3, 0.6)
        tab.wait("window.zoomed")
        low, high = tab.eval("zoomed")
        assert (low, high) == (0, 1) if whole else 0.1 < low < 0.4 < high < 0.7


def test_what_has_no_place_on_a_log_scale_is_not_drawn_at_its_foot(tab: Tab, shown: Shown) -> None:
    with lone_chart(tab, shown, "{ log: true }"):
        zero, least, height = tab.eval("[chart.box.y(0), chart.box.y(1), 200]")
        assert least < height < zero


def test_labels_of_an_axis_differ(tab: Tab, shown: Shown) -> None:
    tab.go(f"{shown.url}/")
    imported = "Promise.all([import('/static/chart.js'), import('/static/format.js')])"

    def told(code: str) -> list[str]:
        return list(
            tab.eval(f"{imported}.then(([{{ across }}, {{ rounded, elapsed }}]) => {code})")
        )

    assert told("[2.3, 2.301].map(one => rounded(one, 0.001))") == ["2.300", "2.301"]
    assert told("[52310, 52320].map(one => rounded(one, 10))") == ["52.31 k", "52.32 k"]
    assert told("[1e-4, 1.1e-4].map(one => rounded(one, 1e-5))") == ["1.0e-4", "1.1e-4"]
    assert told("across(1, 3, 12, 'step')") == [1, 2, 3]
    assert told("across(101, 299, 2, 'step')") == [150, 200, 250]

    def times(low: float, high: float) -> list[str]:
        found = f"across({low}, {high}, 4, 'time')"
        return told(f"{found}.map((one, _, all) => elapsed(one, all[1] - all[0]))")

    assert times(0, 0.8) == ["0s", "0.2s", "0.4s", "0.6s", "0.8s"]
    assert times(0, 60) == ["0s", "15s", "30s", "45s", "1m 00s"]
    assert times(3600, 3640) == [
        "1h 00m 00s",
        "1h 00m 10s",
        "1h 00m 20s",
        "1h 00m 30s",
        "1h 00m 40s",
    ]
    assert times(0, 40000) == ["0s", "3h", "6h", "9h"]
    assert times(0, 6000) == ["0s", "30m", "1h 00m", "1h 30m"]
    assert times(86400 * 2, 86400 * 20) == ["5d", "10d", "15d", "20d"]


def test_a_value_that_was_not_logged_says_what_it_is(tab: Tab, tmp_path: Path) -> None:
    made_up_run(tmp_path, "long", steps=3000, log_every=1)
    tip = (
        "(() => { const c = document.querySelector('.chart'), b = c.getBoundingClientRect();"
        " c.dispatchEvent(new PointerEvent('pointermove', { clientX: b.left + b.width / 2,"
        " clientY: b.top + 40 })); return document.querySelector('.tip').innerText; })()"
    )
    with showing(tmp_path) as server:
        tab.go(f"{server.url}/#/run?run=long")
        tab.wait(f"{tip}.includes('mean of 2 to 3 logged')")
        tab.eval(
            "(() => { const i = document.querySelector('.controls input[type=range]'); i.value = 1;"
            " i.dispatchEvent(new Event('input')); })()"
        )
        tab.wait(f"{tip}.includes('smoothed')")
        tab.drag(".chart", 0.5, 0.6)
        tab.wait(f"{tip}.includes('smoothed')")


def test_what_failed_and_what_to_type_is_seen_first(tab: Tab, shown: Shown) -> None:
    tab.go(f"{shown.url}/#/run?run=failed")
    tab.wait("document.querySelector('#failure') !== null")
    text = tab.text("#failure")
    assert "Train failed at step 40" in text
    assert "disk full" in text
    assert re.search(r"when\s+20\d\d-\d\d-\d\d \d\d:\d\d \w+", text), text
    assert "ingot run" in text


@pytest.mark.drawn("runs in a browser")
def test_a_run_at_work_is_followed_without_loading_again(tab: Tab, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "runs", "alone", steps=50)
    with showing(tmp_path / "runs") as server:
        tab.go(f"{server.url}/")
        tab.wait("document.querySelector('tr[data-id=alone]') !== null")
        append_line(run.metrics, {"step": 77_777, "t_wall": time.time(), "train/loss": 0.5})
        tab.wait("document.querySelector('tr[data-id=alone]').innerText.includes('77,777')")
        made_up_run(tmp_path / "runs", "another", steps=5)
        tab.wait("document.querySelector('tr[data-id=another]') !== null")


@contextlib.contextmanager
def impatient(tab: Tab) -> Iterator[None]:
    """Pages that are opened here refresh all the time, and get no answer while `window.gone`."""
    script = tab.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="window.setInterval = (real => (f, ms) => real(f, ms / 100))(setInterval);"
        " window.fetch = (real => (...it) => window.gone ? Promise.reject() : real(...it))(fetch)",
    )
    yield
    tab.go("about:blank")
    tab.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])


def test_a_server_that_is_gone_is_told(tab: Tab, shown: Shown) -> None:
    """It was shown as running for ever."""
    with impatient(tab):
        tab.go(f"{shown.url}/")
        tab.wait("document.querySelector('tr[data-id=first] .pill') !== null")
        tab.eval("document.body.insertAdjacentHTML('beforeend', '<i class=\"pill live\">on</i>')")
        pulse = "getComputedStyle(document.querySelector('.pill.live'), '::before').animationName"
        assert tab.eval(pulse) == "pulse"
        assert tab.text("[role=status]") == ""
        tab.eval("window.gone = true")
        tab.wait(
            "/no answer since ..:..:..; what/.test(document.querySelector('[role=status]').innerText)"
        )
        assert tab.eval(pulse) == "none"
        tab.eval("window.gone = false")
        tab.wait("document.querySelector('[role=status]').innerText === ''")
        assert tab.eval(pulse) == "pulse"


def test_a_chosen_curve_hides_none_that_comes_later(tab: Tab, tmp_path: Path) -> None:
    run = made_up_run(tmp_path, "alone", steps=50)
    with showing(tmp_path) as server, impatient(tab):
        tab.go(f"{server.url}/#/compare?run=alone")
        chosen = "[...document.querySelectorAll('details button')].find(b => b.textContent === 'validation/seconds')"
        append_line(run.metrics, {"step": 50, "validation/seconds": 2.0})
        tab.wait(f"{chosen}?.getAttribute('aria-pressed') === 'false'")
        tab.eval(f"{chosen}.click()")
        canvas = "document.querySelector('canvas[aria-label=\"{} of alone\"]') !== null"
        tab.wait(canvas.format("validation/seconds"))
        append_line(run.metrics, {"step": 51, "gpu/rank0_util": 0.5, "a/new": 1.0})
        tab.wait(canvas.format("GPU use"))
        assert "a/new" in tab.eval("document.querySelector('details').textContent")
        assert tab.eval(f"{chosen}.getAttribute('aria-pressed')") == "true"
        assert tab.eval(canvas.format("validation/seconds"))


def test_figures_of_other_sets_are_not_comparable_among_any_number(
    tab: Tab, tmp_path: Path
) -> None:
    for name in ("one", "other", "third"):
        run = made_up_run(tmp_path, name, steps=20)
    report = run.reports / "evaluate.json"
    report.write_text(report.read_text().replace("0ddba11decaf0002", "of another set"))
    with showing(tmp_path) as server:
        tab.go(f"{server.url}/#/compare?run=one&run=other&run=third")
        figures = "Object.fromEntries([...document.querySelectorAll('#figures tbody tr')].map("
        figures += "row => [row.firstChild.innerText, row.lastChild.innerText]))"
        told = tab.wait(f"document.querySelector('#figures') && {figures}")
        assert told["loss/bits_per_byte"] == "not comparable"
        assert told["loss/perplexity"] == ""


@pytest.mark.drawn("runs in a browser")
def test_texts_of_runs_are_texts(tab: Tab, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "runs", "alone", steps=50)
    evil = "<img src=x onerror=document.title='taken'> -> <script>document.title='taken'</script>"
    append_line(run.metrics, {"step": 50, "samples/0": evil})
    run.recipe.write_text(run.recipe.read_text().replace("name: alone", f'name: "{evil}"'))
    with showing(tmp_path / "runs") as server:
        for page in ("", "#/run?run=alone"):
            tab.go("about:blank")
            tab.go(f"{server.url}/{page}")
            tab.wait("document.body.innerText.includes('onerror')")
            assert tab.eval("document.querySelectorAll('#view img, #view script').length") == 0
            assert tab.eval("document.title") != "taken"


@pytest.mark.drawn("widths of pages")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_is_wider_than_its_window(tab: Tab, width: int, dark: bool, shown: Shown) -> None:
    tab.look(width, 844, dark=dark)
    views = {
        "#/": "tr[data-id]",
        "#/run?run=first": "#recipe",
        "#/run?run=failed": "#failure",
        "#/compare?run=first&run=second": "#samples",
        "#/registry": ".empty",
        "#/play": ".empty",
    }
    for address, ready in views.items():
        tab.go("about:blank")
        tab.go(f"{shown.url}/{address}")
        tab.wait(f"document.querySelector('{ready}') !== null")
        assert tab.sideways == 0, address
    paper = tab.eval("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(20, 17, 14)") == dark


@pytest.mark.drawn("widths of pages")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_longest_metric_stays_within_the_gate_s_card(
    tab: Tab, tmp_path: Path, width: int
) -> None:
    run = made_up_run(tmp_path, "alone", steps=20)
    gate = json.loads((run.reports / "gate.json").read_text())
    gate["metrics"][0]["metric"] = f"{'a_long_task_of_many_words/' * 3}exact_match"
    (run.reports / "gate.json").write_text(json.dumps(gate))
    tab.look(width)
    with showing(tmp_path) as server:
        for address in (f"{server.url}/#/run?run=alone", write_page(run).as_uri()):
            tab.go(address)
            tab.wait("document.querySelector('#gate td') !== null")
            within = (
                "(card => card.scrollWidth - card.clientWidth)(document.querySelector('#gate'))"
            )
            assert tab.eval(within) == 0, address
            tall = "document.querySelector('#gate td').offsetHeight"
            assert tab.eval(tall) < 200, "broken, but not at every letter"


@pytest.mark.drawn
@pytest.mark.parametrize("width", [1200, 1600])
def test_all_columns_of_the_table_are_seen_at_once(tab: Tab, tmp_path: Path, width: int) -> None:
    """Dates were out of sight to the right: a long name, a restart, and a cost were too much."""
    run = made_up_run(tmp_path, "instruct-llama-3b-second-try-lr-2e-5", steps=12_000)
    run.plan.write_text(json.dumps({"place": {"price": {"on_demand": 31.4}}}))
    append_line(run.events, {"kind": "stop", "step": 12_000, "t_wall": 2e9})
    (run.steps / "train.json").unlink()
    tab.look(width)
    with showing(tmp_path) as shown:
        tab.go(f"{shown.url}/")
        tab.wait("document.querySelector('tr[data-id]') !== null")
        heads = tab.eval("[...document.querySelectorAll('.runs th')].map(h => h.dataset.key)")
        assert {"validation", "bits", "goodput", "restarts", "cost", "changed"} <= set(heads)
        assert "2.62 M" in tab.text(".who small")
        box = "document.querySelector('.runs .wide')"
        assert tab.eval(f"{box}.scrollWidth - {box}.clientWidth") == 0


def test_an_empty_folder_says_what_to_do(tab: Tab, tmp_path: Path) -> None:
    with showing(tmp_path) as server:
        tab.go(f"{server.url}/")
        tab.wait("document.body.innerText.includes('ingot run quickstart')")
        tab.go(f"{server.url}/#/compare")
        tab.wait("document.body.innerText.includes('No curves yet')")


def test_rolling_back_asks_first_and_has_the_token_of_the_address(tab: Tab, tmp_path: Path) -> None:
    runs = runs_folder(tmp_path)
    registry = LocalRegistry(runs / "registry.sqlite")
    for name in ("first", "second"):
        run = RunFolder(runs / name)
        report = read_report(run.reports / "evaluate.json")
        made = {**vars(report), "model_hash": name}
        version = registry.add("python", run.model, type(report)(**made), {"run": name})
        registry.point("python", version.number, "gate")
    with showing(runs, "--allow-actions") as server:
        tab.go(f"{server.url}/#token={server.token}")
        tab.wait("location.hash === '#/'")
        tab.go(f"{server.url}/#/registry")
        tab.wait("document.body.innerText.includes('Roll back')")
        tab.eval("window.confirm = () => true")
        tab.click(".titled button")
        tab.wait("document.querySelector('tbody tr:nth-child(2)').innerText.includes('live')")
        live = registry.live("python")
        assert live is not None
        assert live.number == 1
