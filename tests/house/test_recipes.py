"""Every recipe that is shipped loads, and says in its head what it is and how to run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ingot.cloud.machines import accelerators_of, check_machine
from ingot.cloud.prices import hourly_price_of, time_limit_s
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.config.shape import batch_plan
from ingot.launch.job import launcher_of
from ingot.launch.run_job import job_of
from ingot.pipeline.plan import plan, submission_problems
from ingot.pipeline.steps import STEPS
from tests.house.source import PROJECT

RECIPES = sorted((PROJECT / "recipes").glob("*.yaml"))
PLACES = sorted((PROJECT / "recipes/places").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {path.name for path in RECIPES} >= {"quickstart.yaml", "adapt_smollm2.yaml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe([path], environ={}, dotenv=None)
    assert isinstance(recipe, Recipe)
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe([resolved], environ={}, dotenv=None) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_head_says_how_to_run_it_and_on_what(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("\nname:")]
    assert all(line.startswith("#") for line in head.strip().splitlines())
    for word in (f"ingot run recipes/{path.name}", "\n# Hardware: ", "\n# Time: "):
        assert word in head


KNOBS_IN_PROSE = re.compile(r"'([a-z_.]+=[^']+)'|(?<![\w'])([a-z_]+(?:\.[a-z_]+)*=[^\s,;]+)")
"""What a head gives as `key=value`, quoted for a shell or not."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_its_head_says_to_try_loads(path: Path) -> None:
    head = path.read_text(encoding="utf-8").split("\nname:")[0]
    tried = re.search(r"# Try: .*(\n#  .*)*", head)
    if tried is not None:
        knobs = [quoted or plain for quoted, plain in KNOBS_IN_PROSE.findall(tried[0])]
        assert knobs
        load_recipe([path], knobs, environ={}, dotenv=None)


def _for_recipes(place: Path) -> list[Path]:
    """The recipes that the first line of a place names."""
    return [
        PROJECT / name
        for name in re.findall(
            r"recipes/\w+\.yaml", place.read_text(encoding="utf-8").splitlines()[0]
        )
    ]


PAIRS = [(place, recipe) for place in PLACES for recipe in _for_recipes(place)]


def _with(place: Path, recipe: Path) -> Recipe:
    return load_recipe([recipe, place], environ={}, dotenv=None)


def test_every_documented_case_has_its_place() -> None:
    assert {(place.stem, recipe.stem) for place, recipe in PAIRS} >= {
        ("laptop", "quickstart"),
        ("vertex", "continue_llama"),
        ("gce_1x1", "t5_small"),
        ("gce_2x16", "t5_small"),
        ("gce_2x16", "t5_xxl"),
        ("gce_8x16", "t5_xxl"),
        ("gce_2x16", "bart_large"),
        ("vertex_1x1", "roberta_large"),
        ("tpu", "roberta_large"),
        ("slurm", "sft_llama_8b"),
        ("slurm", "pretrain_llama_8b"),
        ("ssh", "pretrain_llama"),
        *(("gpus_8", f"{name}_llama") for name in ("pretrain", "sft", "lora", "dpo", "distill")),
    }
    assert {place for place, _ in PAIRS} == set(PLACES)


@pytest.mark.parametrize(("place", "recipe"), PAIRS, ids=lambda path: path.stem)
def test_a_place_fits_each_recipe_that_its_first_line_names(place: Path, recipe: Path) -> None:
    """It loads, and batch and mesh divide over its processes."""
    loaded = _with(place, recipe)
    alone = load_recipe([recipe], environ={}, dotenv=None)
    assert loaded.launch != alone.launch or place.stem == "laptop"
    batch_plan(loaded.train, loaded.parallel, loaded.launch.nodes * loaded.launch.processes)
    assert loaded.model == alone.model
    assert loaded.data == alone.data


@pytest.mark.parametrize("place", PLACES, ids=lambda path: path.stem)
def test_a_place_changes_little_besides_where_things_run(place: Path) -> None:
    sections = set(yaml.safe_load(place.read_text(encoding="utf-8")))
    assert sections <= {"launch", "cloud", "pipeline", "registry", "serve"} | (
        {"train", "parallel"} if place.stem == "gce_8x16" else set()
    )


@pytest.mark.parametrize(("place", "recipe"), PAIRS, ids=lambda path: path.stem)
def test_its_machines_exist_and_have_a_device_for_each_process(place: Path, recipe: Path) -> None:
    loaded = _with(place, recipe)
    launch = loaded.launch
    machines = [step.machine for step in loaded.pipeline.steps.values() if step.machine is not None]
    if launch.kind in ("gce", "vertex"):
        machines += [launch.machine, loaded.serve.machine]
    assert [reason for machine in machines for reason in check_machine(machine)] == []
    for placed in (loaded.at(step.verb).launch for step in STEPS if step.distributed):
        if placed.kind in ("gce", "vertex"):
            assert accelerators_of(placed.machine)[1] == placed.processes
    if launch.kind in ("gce", "vertex"):
        assert loaded.at("evaluate").launch.nodes == 1
        assert hourly_price_of(loaded.at("evaluate")) < 6
    if loaded.cloud.max_cost is not None:
        assert time_limit_s(loaded) == loaded.cloud.max_run, "money is left when time is over"
    if launch.kind == "slurm":
        assert launch.slurm.gpus == launch.processes
    if launch.kind == "ssh":
        assert len(launch.ssh.hosts) == launch.nodes


@pytest.mark.parametrize(
    ("place", "recipe"),
    [pair for pair in PAIRS if "ingot submit" in pair[0].read_text(encoding="utf-8")],
    ids=lambda path: path.stem,
)
def test_a_place_for_pipelines_is_one(place: Path, recipe: Path) -> None:
    """But for data of this machine, which a pipeline does not see."""
    loaded = _with(place, recipe)
    assert [
        reason for reason in submission_problems(loaded) if "lies on this machine" not in reason
    ] == []
    assert all(
        "launch.kind=vertex" in step.place
        for step in plan(loaded).steps
        if step.verb in ("train", "evaluate")
    )


@pytest.mark.parametrize("place", PLACES, ids=lambda path: path.stem)
def test_what_must_be_replaced_is_listed_at_its_head(place: Path) -> None:
    text = place.read_text(encoding="utf-8")
    body = text[text.index("\n\n") :]
    listed = re.findall(r"^# Replace: (.*)$", text, flags=re.MULTILINE)
    named = set(listed[0].split(", ")) if listed else set()
    assert named == set(re.findall(r"(?<![\w/.:@-])(?:secret:)?((?:me@)?my-[\w@.-]+)", body))
    loaded = yaml.safe_load(text)
    assert loaded.get("cloud", {}).get("project", "my-project") == "my-project"
    assert (loaded["launch"]["kind"] in ("gce", "vertex", "tpu")) == ("my-bucket" in named)


def test_a_place_is_run_as_its_head_says() -> None:
    for place in PLACES:
        text = place.read_text(encoding="utf-8")
        assert re.search(
            rf"^#   ingot (run|submit|launch train) recipes/\w+\.yaml recipes/places/{place.name}",
            text,
            flags=re.MULTILINE,
        ), place


def test_the_table_of_recipes_and_places_is_whole() -> None:
    """Every pair that it names is one that fits, every place stands in it, and every command names
    files that exist.
    """
    rows = [
        line
        for line in (PROJECT / "recipes/README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and "`ingot" in line
    ]
    named = [[PROJECT / name for name in re.findall(r"recipes/[\w/]+\.yaml", row)] for row in rows]
    assert all(path.is_file() for paths in named for path in paths)
    pairs = {(paths[1], paths[0]) for paths in named if len(paths) == 2}
    assert pairs <= set(PAIRS)
    assert {place for place, _ in pairs} == set(PLACES)
    assert {paths[0] for paths in named} == set(RECIPES)


@pytest.mark.parametrize(("nodes", "share"), [(1, "--cpus-per-task=64"), (2, "--exclusive")])
def test_llama_8b_is_pretrained_from_megatrons_columns_on_nodes_of_slurm(
    nodes: int, share: str
) -> None:
    files = [PROJECT / f"recipes/{name}.yaml" for name in ("pretrain_llama_8b", "places/slurm")]
    loaded = load_recipe(files, [f"launch.nodes={nodes}"], environ={}, dotenv=None, verb="train")
    assert [source.scheme for source in loaded.data.train] == ["megatron"]
    assert (loaded.objective.kind, loaded.parallel.tensor) == ("pretrain", 4)
    placed = loaded.at("train")
    batch_plan(placed.train, placed.parallel, nodes * placed.launch.processes)
    script = launcher_of(placed).render(job_of(placed, "train", distributed=True))
    lines = script.splitlines()
    assert {f"#SBATCH --nodes={nodes}", "#SBATCH --gpus-per-node=8", f"#SBATCH {share}"} <= set(
        lines
    )
    assert {f"export PET_NNODES={nodes}", "export PET_NPROC_PER_NODE=8"} <= set(lines)
