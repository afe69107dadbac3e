"""`ingot recipes` and `ingot init`, in a folder that holds nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.cli import doctor
from ingot.cli.recipes import _written, new
from ingot.config.load import load_recipe
from ingot.config.shipped import names
from ingot.plan.checks.recipe import judge_rate
from ingot.plan.storage import ModelSize
from tests.cli.commands import ingot
from tests.cli.tiny_model import write_model


def test_all_are_listed_with_hardware_and_time(tmp_path: Path) -> None:
    done = ingot("recipes", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in names())
    told = json.loads(ingot("recipes", "--json", cwd=tmp_path).stdout)
    assert (told["schema"], told["verb"]) == (1, "recipes")
    assert sorted(each["name"] for each in told["recipes"]) == sorted(names())
    (quick,) = [each for each in told["recipes"] if each["name"] == "quickstart"]
    assert Path(quick["path"]).is_file()
    # A cell's first words stand in one line, however wide the column is.
    for field in ("hardware", "time"):
        assert " ".join(quick[field].split()[:3]) in done.stdout


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("quickstart",), "quickstart.yaml"),
        (("quickstart", "deep/folder"), "deep/folder/quickstart.yaml"),
        (("recipes/quickstart.yaml", "own.yaml"), "own.yaml"),
        (("places/laptop",), "laptop.yaml"),
    ],
)
def test_a_copy_loads_and_its_head_names_the_copy(
    words: tuple[str, ...], path: str, tmp_path: Path
) -> None:
    done = ingot("init", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    copy = tmp_path / path
    if "laptop" in path:
        load_recipe(["quickstart", copy], environ={}, dotenv=None)
        return
    assert load_recipe([copy], environ={}, dotenv=None).name == "quickstart"
    assert f"#   ingot run {path}\n" in copy.read_text()


def test_what_was_edited_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("name: mine\n")
    done = ingot("init", "quickstart", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "quickstart.yaml exists" in done.stderr
    assert (tmp_path / "quickstart.yaml").read_text() == "name: mine\n"
    assert ingot("init", "quickstart", "--overwrite", cwd=tmp_path).returncode == 0


def test_an_unknown_name_leads_on(tmp_path: Path) -> None:
    done = ingot("init", "quckstart", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean `quickstart`" in done.stderr


def test_a_name_is_read_and_told_where_a_file_could_be_meant(tmp_path: Path) -> None:
    """Whoever edits a copy and then types the name would train the recipe that was not edited."""
    (tmp_path / "quickstart.yaml").write_text("name: mine\ndata: {train: [{source: x}]}\n")
    done = ingot("show", "config", "quickstart", cwd=tmp_path)
    assert done.stdout.startswith("name: quickstart\n")
    assert "quickstart.yaml here is not read" in done.stderr
    done = ingot("show", "config", "quickstart.yaml", cwd=tmp_path)
    assert done.stdout.startswith("name: mine\n")
    assert done.stderr == ""


def test_targets_and_folders_of_a_named_recipe(tmp_path: Path) -> None:
    """Without a run and a registry, what is missing is said of the recipe's own run folder."""
    for words in (("show", "run", "quickstart"), ("predict", "quickstart", "hi")):
        done = ingot(*words, cwd=tmp_path)
        assert "runs/quickstart" in done.stderr + done.stdout, done.stderr


def test_the_doctors_findings_as_json(tmp_path: Path) -> None:
    done = ingot("doctor", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (told["schema"], told["verb"]) == (1, "doctor")
    found = {each["what"]: each for each in told["findings"]}
    assert found["torch"]["ok"]
    assert found["packages"]["ok"]
    assert (done.returncode == 0) == (told["missing"] == [])


def test_the_doctor_names_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name == "httpx" else there(name)
    )
    (found,) = doctor._packages()
    assert (found.ok, found.needed) == (False, True)
    assert found.get.startswith("pip install 'httpx")


@pytest.mark.parametrize(
    ("purpose", "model", "machine"),
    [
        ("pretrain", "preset:llama-3m", "cpu"),
        ("adapt", "MODEL", "gpu"),
        ("chat", "MODEL", "4"),
        ("prefer", "MODEL", "cpu"),
    ],
)
def test_a_new_recipe_is_commented_and_passes_the_check(
    purpose: str, model: str, machine: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "tiny", special=["<|im_start|>", "<|im_end|>"])
    lines = {
        "chat": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "prefer": '{"prompt": "a", "chosen": "b", "rejected": "c"}',
    }
    (tmp_path / "mine.jsonl").write_text((lines.get(purpose, '{"text": "a b c"}') + "\n") * 50)
    words = ("--data", "mine.jsonl", "--for", purpose, "--machine", machine)
    chosen = model.replace("MODEL", str(folder))
    done = ingot("new", *words, "--model", chosen, "--write", "x/my run.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x/my run.yaml\n"), done.stderr
    if purpose == "prefer":
        assert "before it can run: " in done.stderr
        assert "has no chat template" in done.stderr, "the model is none that was tuned on chats"
    else:
        assert "before it can run" not in done.stderr
    text = (tmp_path / "x/my run.yaml").read_text()
    assert text.count("#") > 10
    recipe = load_recipe([tmp_path / "x/my run.yaml"], environ={}, dotenv=None)
    assert recipe.name == "my-run"
    assert recipe.model.source == chosen
    assert recipe.launch.processes == (4 if machine == "4" else 1)
    assert recipe.documents == {"chat": "chat", "prefer": "preference"}.get(purpose, "text")
    if model == "MODEL":  # `ingot plan` does not warn of what `ingot new` wrote
        rate = judge_rate(recipe, ModelSize(135_000_000, 135_000_000), random=False)
        assert rate.kind != "warning", rate.message


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("base", "chatml"),
        ("tuned", None),
        ("hf:o/Some-1B-Instruct", None),
        ("preset:llama-3m", "chatml"),
    ],
)
def test_a_model_that_was_tuned_on_chats_keeps_its_template(
    name: str, template: str | None, tmp_path: Path
) -> None:
    """Another one would be learnt anew, from the little that is there."""
    model = name if ":" in name else str(write_model(tmp_path / name))
    if name == "tuned":
        (tmp_path / "tuned/chat_template.jinja").write_text("{{ messages[0].content }}")
    written = _written(tmp_path / "n.yaml", "mine.jsonl", "chat", model, 0)
    (tmp_path / "n.yaml").write_text(written)
    recipe = load_recipe([tmp_path / "n.yaml"], environ={}, dotenv=None)
    assert recipe.tokenizer.template == template


@pytest.mark.parametrize(
    ("machine", "documents", "batch", "micro", "epochs"),
    [
        ("cpu", 100, 1, 1, 3),  # some 7 rows of 512 tokens
        ("cpu", 2_000, 16, 4, 3),
        ("cpu", 20_000, 16, 4, 1),
        ("3", 1_000, 6, 2, 3),
        ("3", 100_000, 72, 8, 1),
    ],
)
def test_a_new_recipes_steps_suit_the_amount_of_data(
    machine: str,
    documents: int,
    batch: int,
    micro: int,
    epochs: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = json.dumps({"text": "a b c d " * 20}) + "\n"
    (tmp_path / "mine.jsonl").write_text(line * documents)
    data, model = str(tmp_path / "mine.jsonl"), str(write_model(tmp_path / "tiny"))
    assert new(data, "adapt", model, machine, str(tmp_path / "n.yaml")) == 0
    assert "before it can run" not in capsys.readouterr().err
    train = load_recipe([tmp_path / "n.yaml"], environ={}, dotenv=None).train
    assert (train.global_batch, train.micro_batch, train.epochs) == (batch, micro, epochs)


def test_what_a_new_recipe_lacks_is_told(tmp_path: Path) -> None:
    words = ("--for", "pretrain", "--machine", "cpu", "--model", "preset:llama-3m")
    done = ingot("new", *words, "--data", "gone/*.jsonl", "--write", "n.yaml", cwd=tmp_path)
    assert done.returncode == 0
    assert "before it can run: " in done.stderr
    for more, told in (
        ((), "nobody can be asked here; add, for example, --data builtin:stdlib --write pretr"),
        (("--data", "x", "--write", "n.yaml"), "n.yaml exists"),
        (("--data", "x", "--write", "n.txt"), "ends in .yaml"),
        (("--data", "x", "--write", "m.yaml", "--machine", "huge"), "not cpu, gpu or a number"),
    ):
        done = ingot("new", *words, *more, cwd=tmp_path)
        assert done.returncode == 2
        assert told in done.stderr
