from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from xxhash import xxh3_128

from ingot.base.errors import Failed, WrongInput
from ingot.base.reports import PipelineStepRecord, VerbOutcome, is_intact, write_report
from ingot.base.runlog import read_lines
from ingot.config.models.content import content_record
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.registry.deploy import DeployRequest, deploy, render_deploy
from ingot.registry.local import LocalRegistry, _copy
from ingot.registry.verbs import approved_report, gate, gate_stamp, register, register_stamp
from tests.registry.models import a_model, a_recipe, a_report, registered_folder, trained
from tests.registry.test_gate import FIRST


def decision(recipe: Recipe) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((recipe.folder.reports / "gate.json").read_text())
    return value


def registry(root: Path) -> LocalRegistry:
    return LocalRegistry(root / "registry.sqlite")


def live(root: Path) -> int | None:
    version = registry(root).live("words")
    return None if version is None else version.number


def both(recipe: Recipe) -> tuple[VerbOutcome, VerbOutcome]:
    return gate(recipe), register(recipe)


def test_the_first_model_is_deployed_and_everything_is_written_down(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    decided = gate(recipe)
    assert decided.exit_code == 0
    assert decided.result == f"deploy: {FIRST}: loss/bits_per_byte is 2.5"
    assert decided.where == str(recipe.folder.reports / "gate.json")
    assert decided.files == {
        "reports/gate.json": (recipe.folder.reports / "gate.json").stat().st_size
    }
    written = decision(recipe)
    assert written["decision"] == "deploy"
    assert written["metrics"] == [
        {
            "metric": "loss/bits_per_byte",
            "direction": "lower",
            "candidate": 2.5,
            "live": None,
            "better": True,
            "reason": "loss/bits_per_byte is 2.5",
        }
    ]
    assert written["rule"]["metric"] == "loss/bits_per_byte"
    assert written["time"].endswith("+00:00")
    registered = register(recipe)
    assert registered.result == "words v1, live"
    assert registered.where == str(tmp_path / "registry" / "words" / "v1")
    assert [(event["kind"], event["cause"]) for event in read_lines(recipe.folder.events)] == [
        ("gate", f"{FIRST}: loss/bits_per_byte is 2.5"),
        ("register", "words v1, live"),
    ]
    assert registry(tmp_path).version("words", 1).lineage["run"] == "r"


def test_a_better_model_goes_live_and_a_worse_one_does_not_though_it_is_registered(
    tmp_path: Path,
) -> None:
    both(trained(a_recipe(tmp_path, "one"), "a", 2.5))
    better, worse = (
        trained(a_recipe(tmp_path, "two"), "b", 2.4),
        trained(a_recipe(tmp_path, "three"), "c", 2.45),
    )
    assert both(better)[1].result == "words v2, live"
    decided, registered = both(worse)
    assert decided.exit_code == 3
    assert (
        decided.result == "keep: loss/bits_per_byte 2.45, live 2.4, lower is better: worse by 0.05"
    )
    assert decision(worse)["live"]["version"] == 2
    assert registered.result == "words v3, v2 stays live"
    assert live(tmp_path) == 2


def test_registering_the_same_model_again_changes_nothing(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    first = both(recipe)
    assert register(recipe) == first[1]
    again = both(recipe)
    assert again[1] == first[1]
    assert again[0].exit_code == 0
    assert len(registry(tmp_path).versions("words")) == 1
    assert len(registry(tmp_path).history("words")) == 1


def test_the_step_is_void_when_the_registered_files_are_gone(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    registered = both(recipe)[1]
    record = PipelineStepRecord(
        "register",
        "",
        registered.outputs,
        1.0,
        registered.result,
        registered.where,
        {},
        registered.files,
    )
    assert is_intact(recipe.folder.root, record)
    shutil.rmtree(tmp_path / "registry" / "words" / "v1")
    assert not is_intact(recipe.folder.root, record)


def test_training_on_does_not_change_what_is_registered(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    both(recipe)
    trained(recipe, "b", 2.4)
    assert (
        registered_folder(registry(tmp_path), "words") / "model.safetensors"
    ).read_bytes() == b"weights of a"
    both(recipe)
    assert (
        registered_folder(registry(tmp_path), "words") / "model.safetensors"
    ).read_bytes() == b"weights of b"
    assert (
        registered_folder(registry(tmp_path), "words", 1) / "model.safetensors"
    ).read_bytes() == b"weights of a"


def test_a_report_about_another_model_is_refused(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    gate(recipe)
    a_model(recipe.folder.model, "b")
    for verb in (gate, register):
        with pytest.raises(
            WrongInput,
            match=(
                r"evaluate\.json is about model a, b lies in .*model now; run `ingot evaluate`"
                r" again"
            ),
        ):
            verb(recipe)


def test_register_wants_a_decision_about_this_model(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    with pytest.raises(
        WrongInput,
        match=(
            r"gate\.json holds no decision about the model of .*run, .* for words in"
            r" .*registry\.sqlite; run `ingot gate` first"
        ),
    ):
        register(recipe)
    gate(recipe)
    with pytest.raises(WrongInput, match="run `ingot gate` first"):
        register(trained(recipe, "b"))
    (recipe.folder.reports / "gate.json").write_text('{"torn')
    with pytest.raises(WrongInput, match="run `ingot gate` first"):
        register(recipe)
    assert not registry(tmp_path).path.exists()


def test_a_decision_holds_for_the_numbers_that_it_was_made_of(tmp_path: Path) -> None:
    both(trained(a_recipe(tmp_path, "one"), "a", 2.5))
    recipe = trained(a_recipe(tmp_path, "two"), "b", 2.4)
    gate(recipe)
    write_report(recipe.folder.reports / "evaluate.json", a_report("b", 9.9))
    for act in (register, approved_report):
        with pytest.raises(WrongInput, match=r"as it is measured now, .*; run `ingot gate` first"):
            act(recipe)
    assert both(recipe)[1].result == "words v2, v1 stays live"
    write_report(recipe.folder.reports / "evaluate.json", a_report("b", 2.3))
    assert register(recipe).result == "words v2, v1 stays live", "no gate has seen this"
    assert both(recipe)[1].result == "words v2, live"


def test_without_a_report_or_a_model_the_next_command_is_named(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    with pytest.raises(WrongInput, match="run `ingot evaluate` first"):
        gate(recipe)
    write_report(recipe.folder.reports / "evaluate.json", a_report("a"))
    with pytest.raises(
        WrongInput,
        match=r"model is not a model folder \(it has no config\.json\); run `ingot train` first",
    ):
        gate(recipe)
    with pytest.raises(
        WrongInput,
        match=r"hf:org/name is not a model folder .*; set evaluate\.model to a local model folder",
    ):
        gate(a_recipe(tmp_path, evaluate={"model": "hf:org/name"}))
    assert not (recipe.folder.reports / "gate.json").exists()
    trained(recipe, "a")
    gate(recipe)
    shutil.rmtree(recipe.folder.model)
    with pytest.raises(WrongInput, match="run `ingot train` first"):
        register(recipe)


def test_of_another_run_it_is_the_exported_model(tmp_path: Path) -> None:
    """As `ingot evaluate` takes it."""
    other = trained(a_recipe(tmp_path, "other"), "a")
    recipe = a_recipe(tmp_path, evaluate={"model": str(other.folder.root)})
    write_report(recipe.folder.reports / "evaluate.json", a_report("b"))
    with pytest.raises(
        WrongInput, match=r"evaluate\.json is about model b, a lies in .*other/model now"
    ):
        gate(recipe)
    write_report(recipe.folder.reports / "evaluate.json", a_report("a"))
    assert both(recipe)[1].result == "words v1, live"
    assert (
        registered_folder(registry(tmp_path), "words") / "model.safetensors"
    ).read_bytes() == b"weights of a"


@pytest.mark.parametrize(
    "elsewhere", [{"name": "other"}, {"name": "words", "path": "PLACE/production.sqlite"}]
)
def test_a_decision_holds_for_one_name_in_one_registry(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    there = {key: value.replace("PLACE", str(tmp_path)) for key, value in elsewhere.items()}
    other = LocalRegistry(Path(there.get("path", tmp_path / "registry.sqlite")))
    both(trained(a_recipe(tmp_path, "one"), "a", 2.5))
    both(trained(a_recipe(tmp_path, "two", registry=there), "b", 2.0))
    here = trained(a_recipe(tmp_path, "new"), "c", 2.4)
    assert gate(here).exit_code == 0
    stamp = gate_stamp(here)
    wrong = a_recipe(tmp_path, "new", registry=there)
    for act in (register, approved_report):
        with pytest.raises(
            WrongInput,
            match=(
                rf"no decision about the model of .*new, .* for {there['name']} in {other.path}; run"
                r" `ingot gate` first"
            ),
        ):
            act(wrong)
    live_there = other.live(there["name"])
    assert live_there is not None
    assert (
        live_there.number,
        len(other.history(there["name"])),
        len(other.versions(there["name"])),
    ) == (1, 1, 1)
    assert gate_stamp(wrong) != stamp
    assert register(here).result == "words v2, live"
    assert both(wrong)[0].exit_code == 3


@pytest.mark.parametrize("lost", ["registry", "candidate"])
def test_a_decision_that_does_not_say_for_which_registry_or_model_counts_as_none(
    lost: str, tmp_path: Path
) -> None:
    """As ingot once wrote it, or a hand: the gate is run again."""
    recipe = trained(a_recipe(tmp_path), "a")
    gate(recipe)
    text = json.dumps(decision(recipe) | {lost: None})
    (recipe.folder.reports / "gate.json").write_text(text)
    with pytest.raises(WrongInput, match="run `ingot gate` first"):
        register(recipe)
    assert both(recipe)[1].result == "words v1, live"
    (recipe.folder.reports / "gate.json").write_text(text)
    assert ((gate_stamp(recipe) or {})["live"] or {})["version"] == 1


def test_a_run_folder_that_was_copied_to_another_registry_is_compared_there_first(
    tmp_path: Path,
) -> None:
    staging, production = tmp_path / "staging", tmp_path / "production"
    both(trained(a_recipe(staging, "one"), "a", 2.5))
    both(trained(a_recipe(production, "one"), "b", 2.0))
    new = trained(a_recipe(staging, "new"), "c", 2.4)
    assert gate(new).exit_code == 0
    shutil.copytree(new.folder.root, production / "new")
    with pytest.raises(
        WrongInput,
        match=(
            r"words v1 in .*production/registry\.sqlite is not the model that the gate compared"
            r" with; run `ingot gate` again"
        ),
    ):
        register(a_recipe(production, "new"))
    assert live(production) == 1
    assert both(a_recipe(production, "new"))[0].exit_code == 3


def test_a_model_that_went_live_since_the_gate_is_compared_first(tmp_path: Path) -> None:
    mine, other = (
        trained(a_recipe(tmp_path, "mine"), "a", 2.5),
        trained(a_recipe(tmp_path, "other"), "b", 2.0),
    )
    gate(mine)
    both(other)
    with pytest.raises(
        WrongInput,
        match=(
            "words v1 went live since the gate compared the new model with nothing; run `ingot"
            " gate` again"
        ),
    ):
        register(mine)
    assert both(mine)[1].result == "words v2, v1 stays live"


def test_a_model_that_was_rolled_back_does_not_come_back_by_itself(tmp_path: Path) -> None:
    both(trained(a_recipe(tmp_path, "one"), "a", 2.5))
    second = trained(a_recipe(tmp_path, "two"), "b", 2.4)
    both(second)
    assert deploy(a_recipe(tmp_path), "words", DeployRequest(back=True)).number == 1
    assert register(second).result == "words v2, v1 stays live"
    assert deploy(a_recipe(tmp_path), "words", DeployRequest(2)).number == 2
    assert register(second).result == "words v2, live"


def test_a_model_that_was_kept_goes_live_when_the_gate_is_told_to(tmp_path: Path) -> None:
    both(trained(a_recipe(tmp_path, "one"), "a", 2.5))
    worse = trained(a_recipe(tmp_path, "two"), "b", 2.6)
    assert both(worse)[1].result == "words v2, v1 stays live"
    told = a_recipe(tmp_path, "two", gate={"override": "deploy"})
    assert both(told)[1].result == "words v2, live"
    assert decision(told)["reason"].startswith("gate.override says deploy; the numbers say keep:")
    assert (
        registry(tmp_path).history("words")[-1].reason.startswith("gate: gate.override says deploy")
    )


def test_after_another_evaluation_set_the_reason_leads_on(tmp_path: Path) -> None:
    """The way that the reason names is walked to its end."""
    both(trained(a_recipe(tmp_path, "one"), "a", 2.5, on="old set"))
    recipe = trained(a_recipe(tmp_path, "two"), "b", 2.4, on="new set")
    folder = registered_folder(registry(tmp_path), "words")
    decided = gate(recipe)
    assert decided.exit_code == 3
    assert decision(recipe)["reason"].endswith(f"(the live model lies in {folder})")
    measured = a_recipe(tmp_path, "two", evaluate={"model": str(folder)})
    write_report(
        recipe.folder.reports / "evaluate.json", a_report("a", 2.5, on="new set")
    )  # what `ingot evaluate evaluate.model=...` leaves
    assert register(measured).result == "words v1, live"
    write_report(recipe.folder.reports / "evaluate.json", a_report("b", 2.4, on="new set"))
    assert both(recipe)[1].result == "words v2, live"


def test_the_stamp_of_the_gate_changes_with_the_live_model_but_not_by_registering(
    tmp_path: Path,
) -> None:
    """Else `ingot run` would run the gate again right after it."""
    one, two = a_recipe(tmp_path, "one"), a_recipe(tmp_path, "two")
    assert gate_stamp(one) is None
    for recipe, model, value in (
        (one, "a", 2.5),
        (one, "b", 2.6),
        (two, "c", 2.4),
        (one, "d", 2.3),
    ):
        trained(recipe, model, value)
        before = gate_stamp(recipe)
        gate(recipe)
        assert gate_stamp(recipe) == before
        register(recipe)
        assert gate_stamp(recipe) == before
        both(recipe)
        assert gate_stamp(recipe) == before
    assert live(tmp_path) == 4
    before = gate_stamp(two)
    deploy(a_recipe(tmp_path), "words", DeployRequest(back=True))
    assert gate_stamp(two) != before
    assert gate_stamp(two) is not None


def test_the_stamp_of_register_changes_with_what_is_live_by_hand_but_not_by_registering(
    tmp_path: Path,
) -> None:
    """Else a version that was rolled back would be told to be live."""
    one, two, kept = (a_recipe(tmp_path, name) for name in ("one", "two", "kept"))
    for recipe, model, value in ((one, "a", 2.5), (two, "b", 2.4), (kept, "c", 2.6)):
        trained(recipe, model, value)
        before = register_stamp(recipe)
        both(recipe)
        assert register_stamp(recipe) == before
    deploy(two, "words", DeployRequest(back=True))
    assert register_stamp(two) == 1
    assert register(two).result == "words v2, v1 stays live"
    assert register_stamp(kept) is None
    deploy(kept, "words", DeployRequest(3))
    assert register_stamp(kept) == 3
    assert register(kept).result == "words v3, live"


def test_resolve_and_deploy_name_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"nothing is registered as words .* it knows no name"):
        registered_folder(registry(tmp_path), "words")
    with pytest.raises(WrongInput, match="nothing is registered as words"):
        deploy(a_recipe(tmp_path), "words", DeployRequest())
    recipe = trained(a_recipe(tmp_path, gate={"override": "keep"}), "a")
    assert both(recipe)[1].result == "words v1, nothing is live"
    with pytest.raises(
        WrongInput,
        match=(
            r"nothing is live as words .* `ingot deploy words --version 1 registry\.path=\S+`"
            r" makes the newest version live"
        ),
    ):
        registered_folder(registry(tmp_path), "words")
    with pytest.raises(WrongInput, match="words has no version 2"):
        deploy(a_recipe(tmp_path), "words", DeployRequest(2))
    assert deploy(a_recipe(tmp_path), "words", DeployRequest(1)).number == 1
    assert registered_folder(registry(tmp_path), "words") == tmp_path / "registry" / "words" / "v1"
    with pytest.raises(WrongInput, match=r"nothing is registered as other .* it knows words"):
        registered_folder(registry(tmp_path), "other")


def test_a_damaged_version_is_neither_deployed_nor_resolved(tmp_path: Path) -> None:
    both(trained(a_recipe(tmp_path), "a"))
    os.truncate(tmp_path / "registry" / "words" / "v1" / "model.safetensors", 3)
    with pytest.raises(WrongInput, match=r"words v1 is damaged: .*model\.safetensors has 3 bytes"):
        registered_folder(registry(tmp_path), "words")
    with pytest.raises(WrongInput, match="words v1 is damaged"):
        deploy(a_recipe(tmp_path), "words", DeployRequest(1))


def test_a_rollback_to_a_damaged_version_leaves_the_live_one(tmp_path: Path) -> None:
    for model, loss in (("a", 2.5), ("b", 2.4)):
        both(trained(a_recipe(tmp_path), model, loss))
    shutil.rmtree(tmp_path / "registry" / "words" / "v1")
    with pytest.raises(WrongInput, match=r"words v1 is damaged: .* has no VERSION\.json"):
        deploy(a_recipe(tmp_path), "words", DeployRequest(back=True))
    assert live(tmp_path) == 2


def test_a_version_that_its_gate_refused_goes_live_by_its_number_alone(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    for model, loss in (("a", 2.5), ("b", 2.4), ("c", 2.6)):
        both(trained(recipe, model, loss))
    says = "words v3 is the newest version, and no gate let it replace v2; `--version 3` makes it"
    for way in (deploy, render_deploy):
        with pytest.raises(WrongInput, match=says):
            way(recipe, "words", DeployRequest())
    assert live(tmp_path) == 2
    assert render_deploy(recipe, "words", DeployRequest(back=True)).startswith("words v1 live")
    assert deploy(recipe, "words", DeployRequest(3)).number == 3
    assert deploy(recipe, "words", DeployRequest(back=True)).number == 2
    assert deploy(recipe, "words", DeployRequest()).number == 3, "it was live by hand since"


def test_what_its_gate_refused_goes_live_by_its_number_alone_also_as_the_first(
    tmp_path: Path,
) -> None:
    recipe = a_recipe(tmp_path, gate={"metric": "loss/bits_per_byte", "floor": 2.0})
    assert both(trained(recipe, "a", 2.5))[1].result == "words v1, nothing is live"
    says = "words v1 is the newest version, and no gate let it go live; `--version 1` makes it live"
    for way in (deploy, render_deploy):
        with pytest.raises(WrongInput, match=says):
            way(recipe, "words", DeployRequest())
    with pytest.raises(WrongInput, match=r"`ingot deploy words --version 1 \S+` makes the newest"):
        deploy(recipe, "words", DeployRequest(back=True))
    assert live(tmp_path) is None
    assert deploy(recipe, "words", DeployRequest(1)).number == 1


def test_a_damaged_version_is_mended_by_registering_it_again(tmp_path: Path) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    both(recipe)
    weights = tmp_path / "registry" / "words" / "v1" / "model.safetensors"
    weights.unlink()
    weights.write_bytes(b"wei")
    assert register(recipe).result == "words v1, live"
    assert registered_folder(registry(tmp_path), "words") == weights.parent
    assert weights.read_bytes() == b"weights of a"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_what_changed_since_its_export_is_not_registered(tmp_path: Path, name: str) -> None:
    recipe = trained(a_recipe(tmp_path), "a")
    folder = recipe.folder.model
    save_file({"head": np.arange(4.0)}, folder / "model.safetensors")
    record = content_record(folder, {"head": xxh3_128(np.arange(4.0).tobytes()).hexdigest()})
    made = json.loads((folder / "ingot.json").read_text())
    (folder / "ingot.json").write_text(json.dumps({**made, "content": record}))
    gate(recipe)
    whole = (folder / name).read_bytes()
    changed = {"model.safetensors": whole[:-1] + b"!", "tokenizer.json": b"[]"}
    (folder / name).write_bytes(changed.get(name, b'{"model_type": "gpt2"}'))
    with pytest.raises(WrongInput, match=rf"exported there: {re.escape(name)}.* changed since"):
        register(recipe)
    assert live(tmp_path) is None
    (folder / name).write_bytes(whole)
    assert register(recipe).result == "words v1, live"


@pytest.mark.parametrize("gone", [None, "model.safetensors"], ids=str)
def test_what_another_run_exports_meanwhile_is_not_registered(
    gone: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was right when it was checked, and the copy holds another model, or is of files of
    which one is gone.
    """
    folder = trained(a_recipe(tmp_path, "other"), "a").folder.model
    recipe = a_recipe(tmp_path, evaluate={"model": str(folder)})
    write_report(recipe.folder.reports / "evaluate.json", a_report("a"))
    gate(recipe)

    def copying(source: Path, target: Path) -> list[str]:
        a_model(source, "b")
        if gone is not None:
            (source / gone).unlink()
            shutil.copyfile(source / gone, target / gone)
        return _copy(source, target)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("ingot.registry.local._copy", copying)
        with pytest.raises(Failed, match=r"model was changed while it was registered.*again"):
            register(recipe)
    assert live(tmp_path) is None
    assert registry(tmp_path).versions("words") == []
    a_model(folder, "a")
    assert register(recipe).result == "words v1, live"


def test_another_tools_weights_that_changed_since_they_were_measured_are_not_registered(
    tmp_path: Path,
) -> None:
    folder = a_model(tmp_path / "trainer_output", "a")
    (folder / "ingot.json").unlink()
    recipe = a_recipe(tmp_path, evaluate={"model": str(folder)})
    write_report(recipe.folder.reports / "evaluate.json", a_report(model_hash(folder)))
    gate(recipe)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"weights of b")
    with pytest.raises(WrongInput, match=r"lies in .*trainer_output now; run `ingot evaluate`"):
        register(recipe)
    assert live(tmp_path) is None
    (folder / "model.safetensors").write_bytes(whole)
    assert register(recipe).result == "words v1, live"


def test_a_version_of_the_right_size_with_other_content_is_not_promoted(tmp_path: Path) -> None:
    both(trained(a_recipe(tmp_path), "a"))
    both(trained(a_recipe(tmp_path), "b", 2.0))
    weights = tmp_path / "registry" / "words" / "v1" / "model.safetensors"
    weights.write_bytes(b"weights of X")
    with pytest.raises(WrongInput, match=r"words v1 is damaged: .*model\.safetensors"):
        deploy(a_recipe(tmp_path), "words", DeployRequest(1))
    assert live(tmp_path) == 2
