"""Doing a step, skipping it, doing it again: with the real `ingest` on a few documents."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.base.environment import NODE_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import entry_of, write_marker
from ingot.base.reports import (
    PipelineStepRecord,
    VerbOutcome,
    begin_record,
    did_not_end,
    read_record,
)
from ingot.base.runfolder import RUN_LOCK, RunFolder, folder_lock
from ingot.base.runlog import read_lines, record_event
from ingot.cli.verbs import STAMPS
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.pipeline.incremental import check_step, keeps_data, run_step
from ingot.pipeline.steps import PipelineStep, step_named
from tests.base.test_runfolder import held_elsewhere

INGEST = step_named("ingest")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(5)),
        encoding="utf-8",
    )
    return path


@pytest.fixture
def recipe_with(documents: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(*overrides: str) -> Recipe:
        return load_recipe(
            (),
            (
                "name=r",
                f"output={tmp_path}/runs",
                f"data.train=[{{source: {documents}}}]",
                *overrides,
            ),
            environ={},
            dotenv=None,
        )

    return make


class Counted:
    """A step's work that counts how often it is done."""

    def __init__(self, recipe: Recipe, outputs: str = "same") -> None:
        self.recipe, self.outputs, self.times = recipe, outputs, 0

    def __call__(self) -> VerbOutcome:
        self.times += 1
        return VerbOutcome("done", "there", self.outputs)


def _ingest(recipe: Recipe, again: bool = False) -> PipelineStepRecord:
    return run_step(INGEST, recipe, lambda: ingest(recipe), STAMPS, again=again)


def _reasons(recipe: Recipe, step: PipelineStep = INGEST) -> tuple[str, ...]:
    return check_step(step, recipe, STAMPS).reasons


def test_a_step_leaves_its_record_and_its_recipe(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with()
    assert _reasons(recipe) == ("not done yet",)
    record = _ingest(recipe)
    assert record.result.startswith("5 documents")
    assert read_record(recipe.folder.steps, "ingest") == record
    assert load_recipe([recipe.folder.recipe], environ={}, dotenv=None) == recipe
    assert _reasons(recipe) == ()


def test_an_unchanged_step_is_not_done_again(
    recipe_with: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with()
    record = _ingest(recipe)
    written = (recipe.folder.raw / "manifest.json").stat().st_mtime_ns
    assert _ingest(recipe) == record
    assert (recipe.folder.raw / "manifest.json").stat().st_mtime_ns == written
    assert "ingest: unchanged, 5 documents" in capsys.readouterr().err
    _ingest(recipe, again=True)
    assert (recipe.folder.raw / "manifest.json").stat().st_mtime_ns != written


def test_what_changed_is_named(
    recipe_with: Callable[..., Recipe], documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ingest(recipe_with())
    assert _reasons(recipe_with("data.on_bad=stop")) == ("data.on_bad skip -> stop",)
    assert _reasons(recipe_with("data.train.0.text=body")) == ("data.train.0.text text -> body",)
    os.utime(documents, ns=(1, 1))
    assert _reasons(recipe_with()) == ("what data.train reads changed",)
    assert _reasons(recipe_with("data.on_bad=stop")) == (
        "data.on_bad skip -> stop",
        "what data.train reads changed",
    )
    monkeypatch.setattr(ingot, "__version__", "9.9")
    assert _reasons(recipe_with())[0].endswith("-> 9.9")


@pytest.fixture
def served(documents: Path) -> Iterator[ThreadingHTTPServer]:
    """The folder of the documents over HTTP, which a test may end."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(documents.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_what_was_read_stands_while_its_source_does_not_answer(
    recipe_with: Callable[..., Recipe],
    served: ThreadingHTTPServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"http://127.0.0.1:{served.server_port}/documents.jsonl"
    far = f"data.train=[{{source: '{address}'}}]"
    recipe = recipe_with(far)
    record = _ingest(recipe)
    served.shutdown()
    served.server_close()
    assert _ingest(recipe) == record
    told = capsys.readouterr().err
    assert re.search(f"ingest: .*{address}: no such file .*; what was read of it before is", told)
    with monkeypatch.context() as newer:
        newer.setattr(ingot, "__version__", "9.9")
        assert _ingest(recipe) == record, "which cannot be read again by a newer version either"
    with pytest.raises(WrongInput, match="check the address"):
        _reasons(recipe_with(far, "data.on_bad=stop"))
    (recipe.folder.raw / "train-00000.parquet").unlink()
    with pytest.raises(WrongInput, match="check the address"):
        _reasons(recipe)


def test_a_file_to_compare_with_stands_while_it_does_not_answer(
    recipe_with: Callable[..., Recipe], served: ThreadingHTTPServer
) -> None:
    address = f"http://127.0.0.1:{served.server_port}/documents.jsonl?X-Amz-Signature=1a2b"
    recipe = recipe_with(f"data.clean.contamination.against=['{address}']")
    prepare, work = step_named("prepare"), Counted(recipe_with())
    run_step(prepare, recipe, work, {})
    served.shutdown()
    served.server_close()
    run_step(prepare, recipe, work, {})
    assert work.times == 1


def test_the_key_of_an_address_stands_in_no_record(
    recipe_with: Callable[..., Recipe], served: ThreadingHTTPServer
) -> None:
    address = f"http://127.0.0.1:{served.server_port}/documents.jsonl?part=1&X-Amz-Signature="
    recipe, renewed = (
        recipe_with(f"data.train=[{{source: '{address}{key}'}}]") for key in ("f1rst", "s3cond")
    )
    _ingest(recipe)
    record_event(recipe.folder.events, "failure", cause=f"ingest: {address}f1rst is gone")
    told = [path.read_text() for path in recipe.folder.root.rglob("*.json*")]
    assert len(told) == 3, "the documents' manifest, the step's record, the events"
    assert "f1rst" not in "".join(told)
    assert "X-Amz-Signature=(hidden:" in told[0]
    assert _reasons(recipe) == ()
    open_raw(recipe)
    assert re.search(r"Signature=\(hidden:.* -> .*\(hidden:", _reasons(renewed)[0])
    with pytest.raises(WrongInput, match="was made from"):
        open_raw(renewed)
    before = _ingest(recipe)
    assert _ingest(renewed).outputs == before.outputs, "a training on it goes on"


def test_missing_or_cut_files_void_a_record(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with()
    _ingest(recipe)
    part = next(recipe.folder.raw.glob("*.parquet"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert _reasons(recipe) == ("what it made is missing or was changed",)
    part.unlink()
    assert _reasons(recipe) == ("what it made is missing or was changed",)
    part.write_bytes(whole)
    assert _reasons(recipe) == ()


def test_a_step_follows_the_outputs_of_those_before_it_not_their_times(
    recipe_with: Callable[..., Recipe],
) -> None:
    recipe = recipe_with()
    prepare, work = step_named("prepare"), Counted(recipe)
    _ingest(recipe)
    run_step(prepare, recipe, work, STAMPS)
    _ingest(recipe, again=True)
    run_step(prepare, recipe, work, STAMPS)
    assert work.times == 1
    Path(recipe.data.train[0].source).write_text('{"text": "other"}\n', encoding="utf-8")
    _ingest(recipe)
    assert _reasons(recipe, prepare) == ("ingest made something else",)


def test_a_failed_step_leaves_no_record_and_is_written_down(
    recipe_with: Callable[..., Recipe],
) -> None:
    recipe = recipe_with()
    _ingest(recipe)

    def fail() -> VerbOutcome:
        raise Failed("disk full")

    with pytest.raises(Failed, match="disk full"):
        run_step(INGEST, recipe, fail, STAMPS, again=True)
    assert read_record(recipe.folder.steps, "ingest") is None
    assert [(event["kind"], event["cause"]) for event in read_lines(recipe.folder.events)] == [
        ("failure", "ingest: disk full")
    ]
    page = (recipe.folder.reports / "index.html").read_text(encoding="utf-8")
    assert "ingest failed" in page
    assert f"ingot run {recipe.folder.recipe}" in page


def test_data_of_another_recipe_is_not_used_unseen(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with()
    _ingest(recipe)
    run_step(step_named("prepare"), recipe, Counted(recipe), STAMPS)
    changed = recipe_with("tokenizer.vocab_size=5000")
    with pytest.raises(
        WrongInput,
        match=r"`prepare` made .*tokenizer\.vocab_size 4096 -> 5000.*run `ingot prepare` again",
    ):
        run_step(step_named("train"), changed, Counted(changed), STAMPS)


def _stopped() -> VerbOutcome:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("verb", "knob"), [("ingest", "data.max_skipped=0.01"), ("prepare", "tokenizer.vocab_size=999")]
)
def test_data_of_a_verb_that_did_not_end_are_not_used(
    recipe_with: Callable[..., Recipe], verb: str, knob: str
) -> None:
    recipe = recipe_with()
    for done in ("ingest", "prepare", "train"):
        run_step(step_named(done), recipe, Counted(recipe), STAMPS)
    changed = recipe_with(knob)
    with pytest.raises(KeyboardInterrupt):
        run_step(step_named(verb), changed, _stopped, STAMPS, again=True)
    work = Counted(recipe)
    for asked in (recipe, changed):
        with pytest.raises(WrongInput, match=f"`{verb}` was begun in .* run `ingot {verb}` again"):
            run_step(step_named("train"), asked, work, STAMPS)
    assert work.times == 0
    for again in (verb, "train"):
        run_step(step_named(again), changed, work, STAMPS)
    assert work.times == 1, "what it made is what it was"


def test_the_model_of_an_earlier_training_is_not_taken_for_that_of_one_that_did_not_end(
    recipe_with: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with()
    model = recipe.folder.model
    for verb in ("prepare", "train"):
        run_step(step_named(verb), recipe, Counted(recipe), STAMPS)
    model.mkdir()
    (model / "ingot.json").write_text('{"step": 4}')
    changed = recipe_with("seed=3")
    with pytest.raises(KeyboardInterrupt):
        run_step(step_named("train"), changed, _stopped, STAMPS)
    work = Counted(recipe)
    run_step(step_named("evaluate"), changed, work, STAMPS)
    told = "`train` was begun in .* and has not ended, so .*/model .step 4. may be an earlier"
    assert re.search(f"note: {told} training's", capsys.readouterr().err)
    for verb in ("gate", "register"):
        with pytest.raises(WrongInput, match=f"{told}.*set evaluate.model={model}"):
            run_step(step_named(verb), changed, work, {})
    assert work.times == 1
    run_step(step_named("gate"), recipe_with("seed=3", f"evaluate.model={model}"), work, {})
    run_step(step_named("train"), changed, work, STAMPS)
    run_step(step_named("gate"), changed, work, {})
    assert work.times == 3, "evaluate, gate, train"


@pytest.mark.parametrize("made", [None, "checkpoints/step-1/rank0.pt", "metrics.jsonl"])
def test_a_training_that_is_refused_before_it_changes_anything_takes_nothing_away(
    recipe_with: Callable[..., Recipe], made: str | None
) -> None:
    recipe = recipe_with()
    run, work = recipe.folder, Counted(recipe)
    for verb in ("prepare", "train", "evaluate", "gate"):
        run_step(step_named(verb), recipe, work, STAMPS)
    before = (run.recipe.read_bytes(), (run.steps / "train.json").read_bytes())

    def refuse() -> VerbOutcome:
        for accompanies in (
            run.heartbeats / "node",
            run.logs / "stacks",
            run.root / (made or ".a"),
        ):
            accompanies.parent.mkdir(parents=True, exist_ok=True)
            accompanies.write_text("of an attempt")
        raise WrongInput("model.config: heads is not in the configuration")

    mistyped = recipe_with("model.config={heads: 3}")
    with pytest.raises(WrongInput, match="heads is not in the configuration"):
        run_step(step_named("train"), mistyped, refuse, STAMPS)
    after = (run.recipe.read_bytes(), (run.steps / "train.json").read_bytes())
    assert (before == after) == (made is None)
    assert did_not_end(run.steps, "train") == (made is not None)
    assert [event["cause"][:5] for event in read_lines(run.events)] == ["train"]
    times = work.times
    run_step(step_named("train"), recipe, work, STAMPS)
    assert work.times == times + (made is not None)


@pytest.mark.parametrize("verb", ["evaluate", "gate"])
def test_a_report_that_was_begun_anew_is_not_decided_by(
    recipe_with: Callable[..., Recipe], verb: str
) -> None:
    recipe, work = recipe_with(), Counted(recipe_with())
    for done in ("prepare", "train", "evaluate", "gate"):
        run_step(step_named(done), recipe, work, {})
    with pytest.raises(KeyboardInterrupt):
        run_step(step_named(verb), recipe, _stopped, {}, again=True)
    decided = work.times
    for after in ("gate", "register"):
        if after != verb:
            with pytest.raises(WrongInput, match=f"`{verb}` was begun in .* run `ingot {verb}`"):
                run_step(step_named(after), recipe, work, {})
    assert work.times == decided
    for again in (verb, "gate", "register"):
        run_step(step_named(again), recipe, work, {})


def test_a_step_on_data_of_another_recipe_is_not_told_as_unchanged(
    recipe_with: Callable[..., Recipe],
) -> None:
    recipe = recipe_with()
    _ingest(recipe)
    work = Counted(recipe)
    for verb in ("prepare", "train"):
        run_step(step_named(verb), recipe, work, STAMPS)
    # A knob of `ingest` alone: prepare and train have it not among their own.
    changed = recipe_with("data.max_skipped=0.01")
    for verb in ("prepare", "train"):
        with pytest.raises(
            WrongInput,
            match=r"`ingest` made .*data\.max_skipped 0\.1 -> 0\.01.*run `ingot ingest` again",
        ):
            run_step(step_named(verb), changed, work, STAMPS)
    assert work.times == 2


def test_a_source_that_moved_does_not_spoil_what_was_made_from_it(
    recipe_with: Callable[..., Recipe], documents: Path
) -> None:
    recipe = recipe_with()
    _ingest(recipe)
    run_step(step_named("prepare"), recipe, Counted(recipe), STAMPS)
    documents.unlink()
    work = Counted(recipe)
    run_step(step_named("train"), recipe, work, STAMPS)
    assert work.times == 1


def test_a_model_of_another_recipe_is_pointed_out(
    recipe_with: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with()
    for verb in ("train", "evaluate"):
        run_step(step_named(verb), recipe, Counted(recipe), STAMPS)
    changed, work = recipe_with("seed=3", "evaluate.prompts=[a]"), Counted(recipe)
    run_step(step_named("evaluate"), changed, work, STAMPS)
    assert work.times == 1
    assert "note: `train` was done with another recipe (seed 0 -> 3)" in capsys.readouterr().err


def test_folders_outside_are_watched(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    recipe = recipe_with(f"model.source={folder}", f"tokenizer.source={folder}")
    for verb in ("prepare", "train"):
        run_step(step_named(verb), recipe, Counted(recipe), STAMPS)
        assert _reasons(recipe, step_named(verb)) == ()
    (folder / "config.json").write_text("{ }", encoding="utf-8")
    for verb in ("prepare", "train"):
        assert _reasons(recipe, step_named(verb)) == (f"{folder} changed",)


def test_one_writer_at_a_time(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with()
    with (
        folder_lock(recipe.folder.root),
        pytest.raises(Failed, match=f"in use by process {os.getpid()}"),
    ):
        _ingest(recipe)


def test_no_verb_takes_the_folder_between_two_steps_of_a_run(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_with()
    work = Counted(recipe)
    with held_elsewhere(recipe.folder.root, RUN_LOCK) as other:
        with pytest.raises(Failed, match=f"in use by process {other.pid}; wait for it"):
            run_step(step_named("train"), recipe, work, STAMPS)
        assert work.times == 0
        monkeypatch.setenv(NODE_VARIABLE, "0")
        run_step(step_named("train"), recipe, work, STAMPS)
    assert work.times == 1


def test_ranks_other_than_the_first_write_nothing(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_with()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    work = Counted(recipe)
    run_step(step_named("train"), recipe, work, STAMPS)
    assert work.times == 1
    assert not recipe.folder.root.exists()


def _checkpoint(run: RunFolder, step: int, content: str, **fields: Any) -> dict[str, Any]:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(content)
    files = [entry_of(folder, "weights")]
    return write_marker(folder, "COMMIT.json", {"step": step, "finished": True, **fields}, files)


def test_a_run_that_was_trained_again_since_is_told_where_a_training_began_with_it(
    recipe_with: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    first = recipe_with("name=first")
    stage = recipe_with(f"train.start_from={first.folder.root}")
    origin = _checkpoint(first.folder, 4, "of then")
    _checkpoint(stage.folder, 9, "own", begun={"origin": {"step": 4, "files": origin["files"]}})
    train, work = step_named("train"), Counted(stage)
    for _ in range(2):
        run_step(train, stage, work, {})
    assert "note" not in capsys.readouterr().err
    _checkpoint(first.folder, 6, "at work", finished=False)
    run_step(train, stage, work, {})
    assert "note" not in capsys.readouterr().err
    _checkpoint(first.folder, 8, "of now")
    run_step(train, stage, work, {})
    told = capsys.readouterr().err
    assert (
        f"note: {first.folder.root} was trained since this training began with its step 4" in told
    )
    assert work.times == 1


def test_an_unfinished_training_keeps_no_data_but_its_own(
    recipe_with: Callable[..., Recipe], documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that were made by hand would be kept for it, and refused by it, each time."""
    recipe, ours = recipe_with(), documents.read_text()
    run, prepare = recipe.folder, step_named("prepare")

    def prepared(data: str) -> None:
        outcome = VerbOutcome("done", "there", data, parts={"train": data})
        run_step(prepare, recipe, lambda: outcome, STAMPS)

    def is_kept() -> bool:
        return keeps_data(INGEST, recipe, check_step(INGEST, recipe, STAMPS)) is not None

    _ingest(recipe)
    prepared("ours")
    _checkpoint(run, 4, "own", finished=False, identity={"data": "ours"})
    documents.write_text('{"text": "other"}\n')
    assert is_kept()
    with monkeypatch.context() as newer:
        newer.setattr(ingot, "__version__", "9.9")
        assert is_kept(), "ingot was upgraded meanwhile"
    _ingest(recipe)
    documents.write_text(ours)
    assert not is_kept(), "prepare has not read them"
    documents.write_text('{"text": "other"}\n')
    prepared("others")
    documents.write_text(ours)
    assert not is_kept()
    _ingest(recipe)
    prepared("ours")
    documents.write_text('{"text": "a third"}\n')
    assert is_kept()
    begin_record(run.steps, "prepare")
    assert is_kept(), "what prepare was about to read"
