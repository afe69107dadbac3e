from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot
from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    begin_record,
    read_record,
    read_report,
    write_record,
    write_report,
)
from ingot.base.runfolder import RunFolder, folder_lock
from ingot.base.runlog import append_line
from ingot.report.headline import trained_tokens
from ingot.report.page import write_page
from ingot.report.run_view import read_run
from ingot.report.tables import show_runs
from tests.report.made_up import PROMPTS, made_up_run
from tests.report.seen import HOLD, Page, check_harmless

SECTIONS = {
    "comparison",
    "gate",
    "training",
    "throughput",
    "goodput",
    "samples",
    "evaluation",
    "steps",
    "events",
    "recipe",
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_up_run(tmp_path / "runs")


def test_every_section_is_there_and_nothing_comes_from_elsewhere(run: RunFolder) -> None:
    path = write_page(run)
    assert path == run.reports / "index.html"
    page = Page(path)
    check_harmless(page)
    assert page.ids == SECTIONS
    assert page.source.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in page.source
    assert 'name="viewport"' in page.source


def test_the_answer_comes_first(run: RunFolder) -> None:
    """The time is that of both attempts, without the 42 seconds between them."""
    text = Page(write_page(run)).text.replace("\u00a0", " ")
    answer = (
        "A model of 2.62 M parameters , trained from random weights on 614 k tokens in 2m 12s . It"
        " needs 2.26 bits for each byte of text that it has not seen, 22 % less than a bigram model"
        " of the same tokens but 11 % more than gzip -9."
    )
    assert (
        text.index("quickstart")
        < text.index("deployed")
        < text.index(answer)
        < text.index("perplexity")
    )


def test_tokens_are_counted_of_text_where_the_steps_tell_how_many(run: RunFolder) -> None:
    """A line has the mean since the line before; steps whose line a restart cut away count by the
    next one.
    """
    assert trained_tokens(read_run(run)) == 300 * 2048
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if "train/loss" in line:
            line["train/tokens_per_step"] = 1000.0 if line["step"] <= 100 else 500.0
    kept = [line for line in lines if not 200 < line["step"] < 250]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    view = read_run(run)
    assert trained_tokens(view) == 100 * 1000 + 200 * 500
    assert "on 200 k tokens" in Page(write_page(run)).text.replace("\u00a0", " ")


def test_a_training_that_went_on_from_another_run_tells_its_own_part(run: RunFolder) -> None:
    made = json.loads((run.model / "ingot.json").read_bytes())
    origin = {"checkpoint": "/elsewhere/runs/chat/checkpoints/step-00000200", "step": 200}
    (run.model / "ingot.json").write_text(json.dumps({**made, "start_from": origin}))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    later = [line for line in lines if line["step"] > 200]
    for line in later:
        line["train/tokens_per_step"] = 1000.0
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in later))
    start = {"kind": "start", "step": 200, "cause": "first step", "seconds": 6.0, "attempt": 1}
    end = {"kind": "finish", "step": 300, "attempt": 1}
    run.events.write_text("")
    for at, event in ((37, start), (97, end)):
        append_line(run.events, {"t_wall": 1e9 + at, "t_mono": at, "rank": 0, **event})
    assert trained_tokens(read_run(run)) == 100 * 1000
    text = Page(write_page(run)).text.replace("\u00a0", " ")
    assert "trained on from chat at step 200 on 100 k tokens in 1m 52s" in text
    assert "in 100 steps" in text


def test_the_numbers_stand_where_they_belong(run: RunFolder) -> None:
    text = Page(write_page(run)).text
    for words in (
        "xz -9 1.80 gzip -9 2.04 this model 2.26 bigram 2.90",  # sorted, the best first
        "loss/bits_per_byte 2.258 2.224 to 2.292 214 lower 0ddba11decaf0002",
        "Gate deploy",
        "live v1",
        "loss/bits_per_byte lower is better",
        "2.2580 2.4193",
        "ingest 4.2 1,718 documents, 33.9 MB data/raw",
        "train 112.4",
        "+44s failure step 118: train: killed (out of memory?)",
        "save × 4 step 150 to 300",
        "train.optimizer.lr 0.002",
        "data.train.0.source builtin:stdlib",
        "9f2c41aa7d3e0b15",
        "def main( self, *args, **kwargs)",
        "6.12 k median",
    ):
        assert words in text, words
    assert "data.train.0.weight" not in text.split("The whole recipe")[0]


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></style><b>",
    "{{ 7 * 7 }}{% raw %}",
    "' onmouseover='x",
    "&lt;&amp;",
    "]]>\x00\u202e",
)


@pytest.mark.parametrize("bad", HOSTILE)
def test_hostile_text_stays_text_wherever_it_stands(run: RunFolder, bad: str) -> None:
    metrics = {
        f"loss/{bad}": Metric(1, 1, 1, "lower", 1, bad),
        "loss/bits_per_byte": Metric(2, 2, 2, "lower", 1, bad),
    }
    write_report(
        run.reports / "evaluate.json",
        EvaluationReport(bad, bad, metrics, {bad: 2.5}, [{"prompt": bad, "completion": bad}]),
    )
    compared = {"metric": bad, "direction": bad, "candidate": bad, "live": bad}
    gate = {
        "decision": bad,
        "reason": bad,
        "time": bad,
        "live": {"version": bad},
        "metrics": [compared],
    }
    (run.reports / "gate.json").write_text(json.dumps(gate))
    (run.reports / "predict.json").write_text(json.dumps({"prompt": bad, "completion": bad}))
    (run.model / "ingot.json").write_text(json.dumps({bad: bad, "base": {"source": bad}}))
    run.recipe.write_text(
        f"name: {json.dumps(bad)}\n{json.dumps(bad)}: {json.dumps(bad)}\n# {bad!r}\nmodel:"
        f" {{source: {json.dumps(bad)}}}\n"
    )
    write_record(run.steps, PipelineStepRecord("train", "", "", 1.0, bad, bad))
    append_line(run.events, {"kind": bad, "step": bad, "cause": bad, "t_wall": 1.0})
    append_line(run.events, {"kind": "hang", "attempt": 2, "step": bad, "cause": bad, "rank": bad})
    append_line(
        run.events,
        {"kind": "start", "attempt": 3, "step": bad, "cause": bad, "t_wall": bad, "seconds": bad},
    )
    page = Page(write_page(run))
    check_harmless(page)
    assert page.ids == SECTIONS
    shown = bad.replace("\x00", "\ufffd")
    assert "".join(page.words).count(bad) + "".join(page.words).count(shown) >= 12


@pytest.mark.parametrize(
    ("gone", "sections"),
    [
        ("reports/evaluate.json", {"evaluation", "comparison"}),
        ("reports/gate.json", {"gate"}),
        ("metrics.jsonl", {"training", "throughput"}),
        ("reports/steps", {"steps"}),
        ("events.jsonl", {"events", "goodput"}),
        ("recipe.yaml", set()),
        ("model", set()),
        ("reports/predict.json", set()),
    ],
)
def test_what_is_missing_is_left_out(run: RunFolder, gone: str, sections: set[str]) -> None:
    target = run.root / gone
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    page = Page(write_page(run))
    assert page.ids == SECTIONS - sections
    assert "could not be read" not in page.text


def test_without_recipe_and_model_there_is_no_recipe_section(run: RunFolder) -> None:
    run.recipe.unlink()
    shutil.rmtree(run.model)
    (run.reports / "evaluate.json").unlink()
    page = Page(write_page(run))
    assert "recipe" not in page.ids
    assert "Training has come to step 300; no model is made of it yet." in page.text


def test_an_empty_folder_is_a_page_that_says_so(tmp_path: Path) -> None:
    page = Page(write_page(RunFolder(tmp_path / "nothing")))
    check_harmless(page)
    assert page.ids == set()
    assert "nothing done yet" in page.text
    assert "Nothing was trained or measured in this run folder yet." in page.text


def test_a_broken_file_is_named_and_the_rest_is_shown(run: RunFolder) -> None:
    (run.reports / "gate.json").write_text('{"torn')
    (run.reports / "evaluate.json").write_text("[]")
    page = Page(write_page(run))
    assert "reports/gate.json could not be read" in page.text
    assert "reports/evaluate.json could not be read" in page.text
    assert page.ids == SECTIONS - {"gate", "evaluation", "comparison"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that tests copy and leave as it is."""
    return made_up_run(tmp_path_factory.mktemp("whole"), steps=20)


FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "reports/evaluate.json",
    "reports/gate.json",
    "reports/predict.json",
    "model/ingot.json",
    "model/config.json",
    "reports/steps/train.json",
)
WRONG = st.sampled_from(
    [
        None,
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"step": "x"}\n',
        '{"kind": 3, "t_wall": "x", "step": []}\n',
        '{"kind": "save", "t_wall": 1e300}\n',
        (
            '{"step": 1, "train/loss": NaN}\n{"step": 2, "train/loss": Infinity}\n{"step": 1e400,'
            ' "train/loss": 1}\n'
        ),
        '{"step": 3, "train/loss": true}\n',
        '{"step": 1, "train/loss": 1e308}\n{"step": 2, "train/loss": -1e308}\n',
        '{"step": 5, "train/loss": 2.0}\n',
        '{"step": -1, "train/loss": 0}\n{"step": 0, "train/lr": 0}\n',
        '{"step": 1, "train/mfu": 0}\n{"step": 2, "train/mfu": 1e-320}\n',
        '{"metrics": {}, "model_hash": 1, "tokenizer_hash": 2}',
        "a: &a [*a]\n",
        "a: {b: 2001-01-01, 3: [x]}\n",
        (
            '{"model_hash": "", "tokenizer_hash": "", "metrics": {}, "baselines": {"gzip": "x",'
            ' "xz": null, "b": 1e999}, "samples": [3, {"prompt": 1}]}'
        ),
        '{"decision": 3}',
        '{"decision": "keep", "metrics": [1, {}], "live": []}',
        '{"completion": 3}',
        '{"base": [], "parameters": "x"}',
        '{"hidden_size": "x"}',
        '{"step": "train", "inputs": "", "outputs": "", "seconds": "x", "result": 1, "where": 2}',
        (
            '{"kind": "start", "t_wall": 1e300, "seconds": -1}\n{"kind": "save", "spent":'
            ' {"productive": 1e400, "waiting": "x"}}\n{"kind": "lost", "seconds": []}\n'
        ),
        '{"step": 1, "inputs": "", "outputs": "", "seconds": 1, "result": 1, "where": 2}',
    ]
)


@pytest.mark.drawn("pages at length")
@settings(max_examples=40, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(FILES), WRONG | st.binary(max_size=30), min_size=1, max_size=4
    )
)
def test_whatever_stands_in_the_files_there_is_a_page(
    whole: RunFolder, changes: dict[str, str | bytes | None]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder, "quickstart"))
        shutil.copytree(whole.root, run.root)
        for name, content in changes.items():
            path = run.root / name
            path.unlink()
            if content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        page = Page(write_page(run))
        check_harmless(page)
        assert not re.search("nan|inf", " ".join(page.paths))


@pytest.mark.drawn("pages at length")
def test_a_long_run_makes_no_long_page_and_loses_no_spike(tmp_path: Path) -> None:
    run = made_up_run(tmp_path, steps=30_000, log_every=1)
    append_line(run.metrics, {"step": 17_777, "train/loss": 40.0})
    page = Page(write_page(run))
    assert len(page.source) < 400_000
    spike = re.search(r'<path class="faint train" d="[^"]*L592\.6 ([\d.]+)L', page.source)
    assert spike is not None
    assert (
        spike[1] == "53.6"
        # there is room for 6 % of the range above the highest point, and below the lowest: 1000 *
        # 0.06 / 1.12
    )
    assert "smoothed" in page.text


def test_marks_stay_within_their_panels(run: RunFolder) -> None:
    for path in Page(write_page(run)).paths:
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path):
            assert 0 <= float(x) <= 1000
            assert 0 <= float(y) <= 1000


def test_what_was_deployed_of_an_earlier_model_is_not_told_of_this_one(run: RunFolder) -> None:
    """The gate kept the live model after a run was trained again; what follows was not done."""
    for verb, after in (("gate", "evaluate"), ("register", "gate"), ("serve", "register")):
        record = read_record(run.steps, verb)
        assert record is not None
        write_record(run.steps, replace(record, knobs={f"from {after}": "out"}))
    assert read_run(run).state == "done up to serve"
    assert read_run(run).answer
    gate = read_record(run.steps, "gate")
    assert gate is not None
    write_record(run.steps, replace(gate, outputs="keep", result="keep: worse by 0.1"))
    view = read_run(run)
    assert view.state == "done up to gate"
    assert [record.step for record in view.records][-2:] == ["evaluate", "gate"]
    assert view.answer is None, "it is the earlier model's"
    assert view.gate is not None
    evaluate = read_record(run.steps, "evaluate")
    assert evaluate is not None
    write_record(run.steps, replace(evaluate, outputs="measured again"))
    view = read_run(run)
    assert (view.gate, view.state) == (None, "done up to evaluate"), "it decided before"


def test_an_earlier_model_is_not_told_of_a_training_that_was_begun_since(run: RunFolder) -> None:
    for verb, after in (("evaluate", "train"), ("gate", "evaluate"), ("register", "gate")):
        record = read_record(run.steps, verb)
        assert record is not None
        write_record(run.steps, replace(record, knobs={f"from {after}": "out"}))
    assert "bits for each byte" in Page(write_page(run)).text
    begin_record(run.steps, "train")
    view, page = read_run(run), Page(write_page(run))
    assert (view.evaluation, view.gate, view.lineage, view.unread) == (None, None, {}, [])
    assert [record.step for record in view.records] == ["ingest", "prepare", "serve"]
    assert "Training has come to step 300; no model is made of it yet." in page.text
    assert "bits for each byte" not in page.text
    assert "(step 300) may be an earlier training's; it, and what was measured" in page.text
    assert "until `ingot train` has brought that to its end" in page.text


def test_what_is_measured_while_a_training_is_unfinished_is_not_told_of_it(run: RunFolder) -> None:
    """`evaluate` then finds no record of a training, and reads the model that lies there."""
    begin_record(run.steps, "train")
    for verb, knobs in (("evaluate", {"from train": None}), ("gate", {"from evaluate": "out"})):
        record = read_record(run.steps, verb)
        assert record is not None
        write_record(run.steps, replace(record, knobs=knobs))
    view = read_run(run)
    assert (view.evaluation, view.gate) == (None, None)
    assert {"evaluate", "gate"}.isdisjoint(record.step for record in view.records)
    assert "perplexity" not in Page(write_page(run)).text


@pytest.mark.parametrize("named", [None, "words:3"])
def test_data_that_are_prepared_since_leave_a_models_figures_as_they_are(
    run: RunFolder, named: str | None
) -> None:
    """`named`: the model in the registry that was measured, which is this run's."""
    made = {"from prepare": "out"} | ({} if named else {"from train": "out"})
    for verb, knobs in (
        ("evaluate", {**made, "knobs": {"evaluate.model": named}}),
        ("gate", {"from evaluate": "out"}),
    ):
        record = read_record(run.steps, verb)
        assert record is not None
        write_record(run.steps, replace(record, knobs=knobs))
    before = read_run(run)
    assert (before.evaluation is not None, before.gate is not None) == (True, True)
    prepare = read_record(run.steps, "prepare")
    assert prepare is not None
    write_record(run.steps, replace(prepare, outputs="other data"))
    since = read_run(run)
    assert (since.evaluation, since.gate) == (before.evaluation, before.gate)
    assert since.notes == []


def test_measures_of_the_model_before_are_not_told_of_one_trained_since(run: RunFolder) -> None:
    for verb, knobs in (("evaluate", {"from train": "out"}), ("train", {})):
        record = read_record(run.steps, verb)
        assert record is not None
        write_record(run.steps, replace(record, knobs=knobs))
    assert read_run(run).evaluation is not None
    assert read_run(run).notes == []
    train = read_record(run.steps, "train")
    assert train is not None
    write_record(run.steps, replace(train, outputs="another model"))
    view = read_run(run)
    assert (view.evaluation, view.examples) == (None, [])
    assert view.lineage, "the model that lies there is this training's"
    assert "about a model that lay here before" in Page(write_page(run)).text


@pytest.mark.parametrize("measured", [None, "pv3"])
def test_figures_of_another_model_are_not_told_of_this_one(
    run: RunFolder, measured: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether `evaluate.model` names it, or it lay here before and nothing was measured since."""
    report = read_report(run.reports / "evaluate.json")
    write_report(run.reports / "evaluate.json", replace(report, model_hash="another"))
    record = read_record(run.steps, "evaluate")
    assert record is not None
    if measured is None:
        begin_record(run.steps, "evaluate")
    else:
        write_record(run.steps, replace(record, knobs={"knobs": {"evaluate.model": measured}}))
    view, page = read_run(run), Page(write_page(run))
    assert (view.evaluation, view.gate, view.answer, view.examples) == (None, None, None, [])
    assert view.lineage
    assert "bits for each byte" not in page.text
    told = f"{measured}, not about" if measured else "a model that lay here before"
    assert f"reports/evaluate.json is about {told}" in page.text
    show_runs(run.root.parent)
    assert "2.258" not in capsys.readouterr().out
    (run.model / "ingot.json").unlink()
    assert read_run(run).evaluation is not None, "it was about the model that is gone"
    (run.steps / "train.json").unlink()
    assert read_run(run).evaluation is None, "training goes on, and has no model yet"
    run.metrics.unlink()
    assert read_run(run).evaluation is not None, "nothing is trained here"


@pytest.mark.parametrize(("kind", "told"), [("sft", True), ("dpo", False), ("grpo", False)])
def test_a_loss_is_of_tokens_where_the_objective_counts_them(
    run: RunFolder, kind: str, told: bool
) -> None:
    recipe = run.recipe.read_text(encoding="utf-8")
    assert "kind: pretrain" in recipe
    run.recipe.write_text(recipe.replace("kind: pretrain", f"kind: {kind}"), encoding="utf-8")
    text = write_page(run).read_text(encoding="utf-8")
    assert ("Loss in nats per token and" in text) == ("<em>nats per token</em>" in text) == told


def test_the_state_is_told(run: RunFolder) -> None:
    (run.steps / "register.json").unlink()
    assert "the gate says deploy" in Page(write_page(run)).text
    (run.reports / "gate.json").write_text(
        (run.reports / "gate.json").read_text().replace('"deploy"', '"keep"')
    )
    assert "the live model stays" in Page(write_page(run)).text
    decided = json.loads((run.reports / "gate.json").read_text())
    (run.reports / "gate.json").write_text(
        json.dumps({**decided, "decision": "deploy", "live": None})
    )
    record = PipelineStepRecord("register", "in", "out", 0.1, "quickstart v1, live", "registry")
    write_record(run.steps, record)
    assert "deployed" in Page(write_page(run)).text
    (run.reports / "gate.json").unlink()
    assert "done up to serve" in Page(write_page(run)).text
    append_line(run.events, {"kind": "failure", "cause": "evaluate: disk full", "t_wall": 2e9})
    assert (
        "done up to serve" in Page(write_page(run)).text
    )  # evaluate was done after all: it has its record
    (run.steps / "evaluate.json").unlink()
    page = Page(write_page(run))
    assert "failed: evaluate" in page.text
    assert "disk full" in page.text
    assert "failure" in page.ids
    append_line(run.events, {"kind": "stop", "step": 300, "cause": "SIGTERM", "t_wall": 2e9})
    (run.steps / "train.json").unlink()
    assert "stopped at step 300" in Page(write_page(run)).text
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(run.root)], stdout=subprocess.PIPE)
    assert held.stdout is not None
    held.stdout.readline()
    assert "running" in Page(write_page(run)).text
    held.kill()
    held.communicate()
    with folder_lock(run.root, "run-lock"):  # `ingot run` itself, which writes the page at its end
        assert "stopped at step 300" in Page(write_page(run)).text


def test_every_prompt_is_shown_with_what_was_written(run: RunFolder) -> None:
    words = "".join(Page(write_page(run)).words)
    for prompt in PROMPTS:
        assert prompt in words


def test_the_base_model_what_is_simple_and_every_item_stand_beside(run: RunFolder) -> None:
    without = Page(write_page(run))
    assert "the model that training started from" not in without.text
    report = read_report(run.reports / "evaluate.json")
    base = {"rouge/rouge1": Metric(0.2125, 0.2, 0.22, "higher", 200, "s")}
    metrics = {**report.metrics, "rouge/rouge1": Metric(0.3341, 0.3, 0.36, "higher", 200, "s")}
    baselines = {**report.baselines, "rouge/rouge1/first_line": 0.1234}
    write_report(
        run.reports / "evaluate.json",
        EvaluationReport(report.model_hash, "t", metrics, baselines, [], base),
    )
    (run.reports / "examples").mkdir()
    for name in ("loss", "odd name", "sets%2Fown"):
        (run.reports / "examples" / f"{name}.parquet").write_bytes(b"")
    page = Page(write_page(run))
    check_harmless(page)
    assert "0.2125" in page.text
    assert "rouge/rouge1/first_line 0.1234" in page.text
    assert page.text.count("0.1234") == 1, "it is no bits per byte, and has no bar"
    assert [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")] == [
        "examples/loss.parquet",
        "examples/odd%20name.parquet",
        "examples/sets%252Fown.parquet",
    ]
    assert "sets/own" in page.text


def test_secrets_that_stand_in_the_recipe_are_hidden(run: RunFolder) -> None:
    secrets = ("hf_abc", "pass word", "line\\nline", "me:pw", "the rest", "in a block")
    run.recipe.write_text(
        run.recipe.read_text()
        + """
launch:
  environment: {WANDB_API_KEY: hf_abc, KEPT: plain}
  variables:
    HF_TOKEN: hf_abc
    MY_PASSWORD: 'pass word'
    PRIVATE_KEY: "line\\nline"
    ADDRESS: https://me:pw@host/x
    OTHER_TOKEN: env:SEEN
    DB_PASSWORD: hf_abc, the rest}
    SIGNING_KEY: |
      in a block
    eos_token: <|end|>
"""
    )
    page = Page(write_page(run))
    for secret in secrets:
        assert secret not in page.source, secret
    for kept in ("plain", "env:SEEN", "host/x", "eos_token", "vocab_size"):
        assert kept in page.text, kept


def test_aliases_in_a_recipe_that_stand_for_billions_hang_nothing(run: RunFolder) -> None:
    lines = [f"k{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(9)]
    run.recipe.write_text("\n".join(lines))
    view = read_run(run)
    assert (view.recipe, view.recipe_text) == ({}, "")
    assert [note for note in view.unread if "aliases that stand for 111,111 values" in note]


def test_what_the_model_wrote_before_training_comes_before_what_it_wrote_after(
    run: RunFolder,
) -> None:
    path = run.reports / "evaluate.json"
    report = read_report(path)
    report.samples[0]["base"] = "as it was before"
    write_report(path, report)
    text = write_page(run).read_text(encoding="utf-8")
    places = [text.index(words) for words in ("as it was", "before training", "after training")]
    assert places == sorted(places)
    assert text.count("written at evaluation") == len(report.samples) - 1


@pytest.mark.parametrize("sheet", ["report/page.css", "serve/playground/base.css"])
def test_coloured_words_are_to_be_read(sheet: str) -> None:
    """4.5 to 1, as WCAG 2 asks of text, on the page and on its cards, by day and by night."""
    text = (Path(ingot.__file__).parent / sheet).read_text(encoding="utf-8")

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", each)) for each in text.split(":root {")[1:]]
    assert len(schemes) == 2
    for scheme in schemes:
        for name in ("ink", "soft", "glow", "cool", "good", "bad", "warn"):
            for ground in ("paper", "card"):
                dark, bright = sorted((light(scheme[name]), light(scheme[ground])))
                assert bright / dark >= 4.5, (name, ground)


def test_a_time_has_its_zone(run: RunFolder) -> None:
    page = Page(write_page(run))
    began = datetime.fromisoformat("2025-06-15T15:08:51+00:00").astimezone()
    assert f"decided {began:%Y-%m-%d %H:%M:%S %Z}" in page.text
