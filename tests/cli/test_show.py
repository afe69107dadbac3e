"""`show`, `explain`, `doctor`: what a person reads in the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ingot.base.errors import WrongInput
from ingot.base.reports import PipelineStepRecord, read_report, write_record, write_report
from ingot.base.storage import write_atomic
from ingot.cli.console import run_folder
from ingot.cli.show import config, data, explain_knob, models, samples
from ingot.cli.verify import data as verify_data
from ingot.config.knobs import knobs
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.models.presets import PRESETS
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.report import write_examples
from ingot.launch.job import Handle
from ingot.pipeline.incremental import run_step
from ingot.pipeline.steps import step_named
from ingot.report.run_view import read_run
from ingot.report.tables import _steps
from tests.cli.commands import ingot as command
from tests.report.made_up import made_up_run
from tests.small import small_recipe, write_documents


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its data prepared, and nothing more."""
    root = tmp_path_factory.mktemp("shown")
    write_documents(root / "text")
    (root / "text/broken.txt").write_bytes(b"\xff\xfe not text")
    recipe = small_recipe(root)
    run_step(step_named("ingest"), recipe, lambda: ingest(recipe), {})
    run_step(step_named("prepare"), recipe, lambda: prepare(recipe), {})
    return root


def test_show_config_is_the_whole_recipe_and_loads_again(root: Path, tmp_path: Path) -> None:
    done = command("show", "config", str(root / "runs/small/recipe.yaml"), "seed=11")
    assert done.returncode == 0
    path = tmp_path / "again.yaml"
    path.write_text(done.stdout, encoding="utf-8")
    recipe = load_recipe([path], environ={}, dotenv=None)
    assert recipe.seed == 11
    assert recipe == load_recipe(
        [root / "runs/small/recipe.yaml"], ["seed=11"], environ={}, dotenv=None
    )


def test_show_config_tells_what_was_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(root / "runs/small/recipe.yaml"), "train.optimizer.lr=0.5"]
    assert config(given, changed=True) == 0
    text = capsys.readouterr().out
    assert "lr: 0.5" in text
    assert "on_bad" not in text
    assert "weight_decay" not in text
    assert config(given, changed=True, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], told["recipe"]["train"]["optimizer"]["lr"]) == ("show config", 0.5)
    assert "on_bad" not in told["recipe"]["data"]


def test_show_config_as_json_loads_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["name=a", "data.train=[{source: x.jsonl}]", "model.source=hf:org/m"]
    (path := tmp_path / "own.yaml").write_text("seed: 1\n", "utf-8")
    assert config([str(path), *given], as_json=True) == 0
    (again := tmp_path / "again.json").write_text(
        json.dumps(json.loads(capsys.readouterr().out)["recipe"]), "utf-8"
    )
    assert load_recipe([again], environ={}, dotenv=None) == load_recipe(
        [path], given, environ={}, dotenv=None
    )


def test_models_and_proofs_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["presets"].keys() >= PRESETS.keys()
    types = {(each["model_type"], each["kind"]): each["state"] for each in told["types"]}
    assert types["llama", "decoder"] == "native"
    assert {"proved", "unproved", "refused"} <= set(types.values())
    assert verify_data([str(root / "runs/small/recipe.yaml")], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], told["holds"]) == ("verify data", True)
    assert {"what", "passed", "detail"} == told["checks"][0].keys()
    with pytest.raises(WrongInput, match=r"data\.clean\.min_chars 0 -> 3"):
        verify_data([str(root / "runs/small/recipe.yaml"), "data.clean.min_chars=3"])


def test_show_knobs_lists_every_one() -> None:
    lines = command("show", "knobs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [knob.path for knob in knobs()]


def test_show_models_lists_presets_with_their_sizes() -> None:
    out = command("show", "models").stdout
    for name in PRESETS:
        assert name in out
    assert "134.5 M" in out
    assert "8.03 B" in out
    assert "SmolLM2" in out


def test_show_run_tells_what_is_done(root: Path) -> None:
    for target in ("runs/small", "runs/small/recipe.yaml"):
        lines = command("show", "run", target, cwd=root).stdout.splitlines()
        rows = {line.split("│")[1].strip(): line for line in lines if line.startswith("│")}
        assert "120 documents" in rows["ingest"]
        assert "vocabulary 320" in rows["prepare"]
        assert "train" not in rows


def test_show_run_tells_where_the_time_of_training_went(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    done = command("show", "run", str(run.root))
    assert done.returncode == 0, done.stderr
    assert (
        "goodput 60.6 %: 1m 46s of 2m 54s were training; 42s down, 10s starting, 8s lost and"
        " repeated, 6s evaluating" in done.stdout
    )
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    assert [row[:3] for row in rows if row[0] in ("training", "down")] == [
        ["training", "1m 46s", "60.6 %"],
        ["down", "42s", "24.1 %"],
    ]
    assert next(row for row in rows if row[0] == "died")[2:] == [
        "",
        "118, 18 again",
        "54s",
        "8s",
        "killed (out of memory?)",
    ]


def test_paths_stay_whole_in_narrow_terminals(tmp_path: Path) -> None:
    run = made_up_run(tmp_path)
    view = read_run(run)
    out = io.StringIO()
    Console(width=60, file=out).print(_steps(view, run))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) == 60, "the table had to be narrowed"
    for record in view.records:
        assert any(f" {view.within(record.where)} " in line for line in lines), record.where


def test_show_run_points_at_what_is_missing(root: Path) -> None:
    part = next((root / "runs/small/data/raw").glob("*.parquet"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    out = command("show", "run", "runs/small", cwd=root).stdout
    part.write_bytes(whole)
    assert "missing" in out
    assert "missing" not in command("show", "run", "runs/small", cwd=root).stdout


def test_show_runs_has_a_line_for_each(root: Path) -> None:
    out = command("show", "runs", cwd=root).stdout
    assert "│ small " in out
    assert "done up to prepare" in out


def test_show_runs_compares_two(root: Path) -> None:
    out = command("show", "runs", "--compare", "runs/small", "runs/small", cwd=root).stdout
    assert "the recipes are the same" in out


def test_show_data_counts_and_names_what_was_skipped(root: Path) -> None:
    out = command("show", "data", "runs/small", cwd=root).stdout
    assert "skipped 1 invalid UTF-8, such as" in out
    assert "broken.txt" in out
    assert "vocabulary 320" in out


def test_what_shows_a_run_takes_the_overrides_of_its_recipe(root: Path) -> None:
    """As all verbs that read a recipe; a run folder has its own."""
    recipe = root / "elsewhere.yaml"
    recipe.write_text(
        dump_recipe(small_recipe(root, name="another"), changed=True), encoding="utf-8"
    )
    assert run_folder(str(recipe)).root == root / "runs/another"
    assert run_folder(str(recipe), "name=small").root == root / "runs/small"
    out = command("show", "data", str(recipe), "name=small", cwd=root).stdout
    assert "vocabulary 320" in out
    with pytest.raises(WrongInput, match="a run folder stands alone"):
        run_folder(str(root / "runs/small"), "name=another")


def test_data_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data([str(root / "runs/small")], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], told["run"]) == ("show data", str(root / "runs/small"))
    ingested = [source for sources in told["ingested"].values() for source in sources]
    assert sum(source["documents"] for source in ingested) == 120
    assert {count for source in ingested for count in source["skipped"].values()} == {1}
    made = told["prepared"]
    kept = sum(source["documents"] for each in made["splits"].values() for source in each)
    left_out = sum(step["documents"] for step in made["left_out"].values())
    assert (kept + left_out, made["vocab_size"]) == (120, 320)
    for each in made["lengths"]:
        of_split = made["splits"][each["split"]]
        tokens, documents = (
            sum(source[name] for source in of_split) for name in ("tokens", "documents")
        )
        assert each["mean"] * documents == pytest.approx(tokens)
    assert made["samples"][0]["text"]


def test_answers_of_a_task_with_references_are_samples_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    path = run.reports / "evaluate.json"
    write_report(path, replace(read_report(path), samples=[]))
    written = [
        {"id": n, "source": f"text {n}", "reference": f"gist {n}", "prediction": f"said {n}"}
        for n in range(9)
    ]
    write_examples(run.reports / "examples/rouge.parquet", written)
    write_examples(run.reports / "examples/choice.parquet", [{"context": "x", "answer": 1}])
    assert samples([str(run.root)], prompts=2) == 0
    assert capsys.readouterr().out.splitlines() == [
        line
        for n in range(2)
        for line in (f"prompt: text {n}", f"reference: gist {n}", f"completion: said {n}")
    ]
    assert samples([str(run.root)], prompts=1, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == [
        {"prompt": "text 0", "reference": "gist 0", "completion": "said 0"}
    ]


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_number_of_prompts_stands_for_another(number: str, tmp_path: Path) -> None:
    done = command("show", "samples", str(made_up_run(tmp_path).root), f"--prompts={number}")
    assert done.returncode == 2
    assert "--prompts" in done.stderr


def test_samples_of_an_evaluation_are_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_up_run(tmp_path)
    path = run.reports / "evaluate.json"
    report = read_report(path)
    report.samples[0]["base"] = "as it was"
    write_report(path, report)
    assert samples([str(run.root)]) == 0
    first = next(line for line in capsys.readouterr().out.splitlines() if "as it was" in line)
    assert first.index("as it was") < first.index(report.samples[0]["completion"].split()[0])
    assert samples([str(run.root)], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == report.samples
    write_report(path, replace(report, model_hash="another"))
    assert samples([str(run.root)]) == 0
    assert "evaluate.json is about a model that lay here before" in capsys.readouterr().err
    report.samples.clear()
    write_report(path, report)
    with pytest.raises(WrongInput, match=r"set evaluate\.prompts"):
        samples([str(run.root)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "run", "."), "no run folder"),
        (("show", "runs", "nothing"), "holds no run"),
        (("show", "data", "missing.yaml"), "does not exist"),
    ],
)
def test_what_is_not_there_is_told(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr


def test_explain_prints_meaning_type_and_default() -> None:
    out = command("explain", "train.clip_norm").stdout
    assert "Largest norm of the whole gradient" in out
    assert "default: 1.0" in out


def test_explain_as_json_has_a_knob_and_what_is_in_a_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explain_knob("train.optimizer", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], [knob["path"] for knob in told["knobs"]]) == (
        "explain",
        ["train.optimizer"],
    )
    inside = {knob["path"]: knob for knob in told["inside"]}
    assert inside["train.optimizer[adamw].lr"].keys() == {"path", "type", "default", "doc"}


def test_explain_of_a_section_lists_what_is_in_it() -> None:
    out = command("explain", "train.optimizer").stdout
    assert "train.optimizer[adamw].lr" in out
    assert "train.optimizer[sgd].momentum" in out


def test_doctor_says_what_is_there_and_how_to_get_the_rest() -> None:
    done = command("doctor")
    assert done.returncode == 0, done.stderr
    for what in (
        "Python",
        "torch",
        "accelerator",
        "memory",
        "disk",
        "Java",
        "Slurm",
        "Hugging Face token",
        "Google Cloud",
    ):
        assert what in done.stdout
    for line in done.stdout.splitlines():
        if "missing" in line:
            assert line.split("│")[4].strip()


def test_doctor_fails_where_something_needed_is_missing(tmp_path: Path) -> None:
    """A folder called torch that is no torch stands in for a machine without it."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')", encoding="utf-8")
    done = command("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "missing and needed: torch" in done.stderr
    assert "pip install torch" in done.stdout


def test_runs_and_jobs_as_json(tmp_path: Path) -> None:
    """In a folder with a run whose steps are on record, and one that was only begun."""
    run = tmp_path / "runs" / "one"
    (run / "reports/steps").mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: one\n")
    record = PipelineStepRecord("ingest", "a", "b", 1.5, "3 documents", "runs/one/data/raw")
    write_record(run / "reports/steps", record)
    (run / "metrics.jsonl").write_text('{"step": 4, "t_wall": 1.0, "train/loss": 2.5}\n')
    told = json.loads(command("show", "run", "runs/one", "--json", cwd=tmp_path).stdout)
    assert (told["schema"], told["verb"], told["step"]) == (1, "show run", 4)
    assert told["steps"]["ingest"]["seconds"] == 1.5
    all_runs = json.loads(command("show", "runs", "--json", cwd=tmp_path).stdout)
    assert [each["name"] for each in all_runs["runs"]] == ["one"]
    knobs = json.loads(command("show", "knobs", "--json").stdout)["knobs"]
    assert "train.optimizer[adamw].lr" in {knob["path"] for knob in knobs}
    handle = Handle("train", "local", "1", ("train",), 5.0, "", {"machine": "", "started": ""})
    write_atomic(run / "jobs/train.json", handle.to_json())
    status = json.loads(command("launch", "status", "runs/one", "--json", cwd=tmp_path).stdout)
    (job,) = status["jobs"]
    assert (job["name"], job["started"], job["state"]) == ("train", 5.0, "unknown")
