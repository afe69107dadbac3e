"""Who may import whom. The table is the plan of the house; a change to it is a decision, to be told
in docs/ARCHITECTURE.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.house.source import Import, Module, modules

GROUND = {"base", "config"}
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "config": {"base"},
    "cloud": GROUND,
    "adopt": GROUND,
    "tokenizers": GROUND,
    "data": GROUND | {"tokenizers", "cloud"},
    "models": GROUND,
    "parallel": GROUND | {"models"},
    "rewards": GROUND,
    "objectives": GROUND | {"models", "data"},
    "checkpoints": GROUND | {"parallel", "models", "tokenizers"},
    "evaluate": GROUND | {*("parallel", "objectives", "rewards", "models", "data", "tokenizers")},
    "train": GROUND
    | {*("evaluate", "checkpoints", "objectives", "rewards", "parallel", "models", "data")}
    | {"tokenizers"},
    "serve": GROUND | {"models", "tokenizers", "rewards"},
    "verify": GROUND
    | {*("serve", "train", "checkpoints", "parallel", "models", "data", "tokenizers")},
    "plan": GROUND
    | {*("train", "objectives", "parallel", "models", "data", "tokenizers", "cloud")},
    "registry": GROUND | {"cloud"},
    "launch": GROUND | {"cloud"},
    "report": GROUND,
    "pipeline": GROUND | {"launch", "report", "cloud"},
}
# A window on runs: what it shows comes from both wings, and it loads no torch.
MAY_IMPORT["ui"] = GROUND | {"data", "tokenizers", "registry", "report", "serve"}
# An entrance beside the command line: it may import every room.
MAY_IMPORT["api"] = set(MAY_IMPORT)
WORK = {
    "rewards",
    "tokenizers",
    "data",
    "models",
    "parallel",
    "objectives",
    "checkpoints",
    "evaluate",
    "train",
    "serve",
    "verify",
    "plan",
}
PLACE = {"pipeline", "launch", "registry", "report", "adopt"}
# The one file that may import an optional or heavy library inside a function.
LAZY_OWNERS = {
    "huggingface_hub": {"ingot.base.hub", "ingot.data.sources.hub"},
    "tensorboard": {"ingot.base.runlog"},
    "wandb": {"ingot.base.runlog"},
    "mlflow": {"ingot.base.trackers"},
    "trackio": {"ingot.base.trackers"},
    "psutil": {"ingot.base.processes"},
    "fsspec": {"ingot.base.remote.web", "ingot.base.storage"},
    "aiohttp": {"ingot.base.remote.web"},
    "rich": {"ingot.base.progress"},
    # torch's distributed packages take one to three seconds to import.
    "torch": {
        "ingot.cli.doctor",
        "ingot.models.parameters",
        "ingot.parallel.shard",
        "ingot.plan.tracing.stand_ins",
    },
    "gigatoken": {"ingot.tokenizers.encoders"},
    "fastokens": {"ingot.tokenizers.encoders"},
    "tiktoken": {"ingot.tokenizers.tiktoken_backend"},
    "sentencepiece": {"ingot.tokenizers.sentencepiece_backend"},
    "datasets": {"ingot.data.sources.hub"},
    "mwparserfromhell": {"ingot.data.sources.wikipedia"},
    "google": {"ingot.cloud.bigquery", "ingot.cloud.clients", "ingot.base.remote.service"},
    "requests": {"ingot.cloud.clients"},
    "google_crc32c": {"ingot.base.remote.service"},
    "py3langid": {"ingot.data.cleaning.steps.filters"},
    "pyspark": {"ingot.data.engines.spark"},
    "apache_beam": {"ingot.data.engines.beam"},
    "transformers": {
        "ingot.models.hf.config",
        "ingot.serve.native.causal",
        "ingot.verify.export.transformers",
    },
    "peft": {"ingot.verify.export.transformers"},
    "rouge_score": {"ingot.evaluate.tasks.rouge"},
    "kfp": {"ingot.pipeline.kubeflow"},
    # Kubeflow sends the source of a component's function along, and nothing around it.
    # Files that need torch's distributed packages as a whole are imported where they are used.
    "ingot": {
        "ingot.api.run",
        "ingot.pipeline.kubeflow",
        "ingot.checkpoints.saver",
        "ingot.parallel.apply",
        "ingot.parallel.pipeline",
        "ingot.plan.tracing.trace",
        "ingot.plan.tracing.workers",
    },
    "IPython": {"ingot.api.curve"},
    "lm_eval": {"ingot.evaluate.tasks.lm_eval"},
    "torchao": {"ingot.parallel.float8"},
    "gguf": {"ingot.checkpoints.gguf.write"},
    "jsonschema": {"ingot.rewards.isolated"},
    "referencing": {"ingot.rewards.isolated"},
}
TORCH_FREE = (
    "ingot.api.run",
    "ingot.cli.app",
    "ingot.cli.verbs",
    "ingot.data.prepare",
    "ingot.rewards.build",
    "ingot.data.ingest",
    "ingot.pipeline.local",
    "ingot.launch.places.local",
    "ingot.launch.supervisor.supervise",
    "ingot.launch.node.main",
    "ingot.launch.run_job",
    "ingot.registry.verbs",
    "ingot.registry.deploy",
    "ingot.pipeline.submit",
    "ingot.cloud.doctor.context",
    "ingot.cloud.builds",
    "ingot.config.serving",
    "ingot.adopt.convert",
    "ingot.report.page",
    "ingot.report.tables",
    "ingot.ui.server",
    "ingot.plan.assemble",
    "ingot.plan.seconds",
    "ingot.cli.views.plan_table",
    "ingot.config.load",
    "ingot.config.knobs",
    "ingot.tokenizers.load",
    "ingot.data.engines.spark",
    "ingot.data.engines.beam",
    "ingot.data.tokenizing.tokenize",
    "ingot.data.cleaning.clean",
    "ingot.data.packing.tables",
)
CLI_FREE = ("torch", "pyarrow", "pydantic", "transformers", "numpy", "httpx", "psutil")


def _room(name: str) -> str:
    return name.split(".")[1] if name.count(".") else ""


def _ours(module: Module) -> list[Import]:
    return [
        item
        for item in module.imports
        if item.module == "ingot" or item.module.startswith("ingot.")
    ]


def test_every_room_is_in_the_table() -> None:
    rooms = {module.room for module in modules()} - {"", "cli"}
    assert rooms == set(MAY_IMPORT)


def test_rooms_import_only_what_the_table_allows() -> None:
    wrong = [
        f"{module.where}:{item.line} imports {item.module}"
        for module in modules()
        if module.room not in ("", "cli")
        for item in _ours(module)
        if _room(item.module) and _room(item.module) not in MAY_IMPORT[module.room] | {module.room}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_allows_no_more_than_is_used() -> None:
    used = {(module.room, _room(item.module)) for module in modules() for item in _ours(module)}
    unused = [
        f"{room} imports nothing of {other}"
        for room, others in MAY_IMPORT.items()
        if room != "api"
        for other in others - GROUND
        if (room, other) not in used
    ]
    assert not unused, "\n".join(unused)


def test_the_wings_never_meet() -> None:
    for left, right in ((WORK, PLACE), (PLACE, WORK)):
        for room in left:
            assert not MAY_IMPORT[room] & right


def test_no_circles_between_modules() -> None:
    """Imports inside functions and for type checking count too: a circle is a circle."""
    graph = {
        module.name: {item.module for item in _ours(module)} - {module.name, "ingot"}
        for module in modules()
    }
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        if name in path:
            pytest.fail("a circle: " + " -> ".join([*path[path.index(name) :], name]))
        if name in done:
            return
        path.append(name)
        for other in sorted(graph.get(name, ())):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def test_imports_stand_at_the_top() -> None:
    """But for the command line's lazy verbs, and optional heavy libraries in the one file that owns
    them.
    """
    wrong, unused = (
        [],
        {(library, owner) for library in LAZY_OWNERS for owner in LAZY_OWNERS[library]},
    )
    for module in modules():
        for item in module.imports:
            library = item.module.split(".")[0]
            lazy_verb = module.room == "cli" and library in ("ingot", "rich", "httpx")
            if not item.inside or lazy_verb:
                continue
            unused.discard((library, module.name))
            if module.name not in LAZY_OWNERS.get(library, set()):
                wrong.append(
                    f"{module.where}:{item.line} imports {item.module} inside {item.inside}()"
                )
    assert not wrong, "\n".join(wrong)
    assert not unused, f"nothing there is imported inside a function: {unused}"


def test_torch_stays_out_of_the_ground_and_the_place_wing() -> None:
    free = (
        "base",
        "config",
        "cloud",
        "tokenizers",
        "data",
        "rewards",
        "registry",
        "launch",
        "report",
        "pipeline",
        "cli",
    )
    found = {
        module.name
        for module in modules()
        if module.room in free
        for item in module.imports
        if item.module.split(".")[0] == "torch" and not item.inside
    }
    assert found <= {"ingot.data.batches.loader"}


def _first_to_load(names: Sequence[str], libraries: tuple[str, ...]) -> list[str]:
    """Import the modules one after the other in a new interpreter: the first of them that brings a
    library, and the library.
    """
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    if found := [library for library in {libraries!r} if library in sys.modules]:\n"
        "        sys.exit(f'{name} loads {found}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.splitlines()


def test_the_data_and_place_wings_load_no_torch() -> None:
    assert _first_to_load(TORCH_FREE, ("torch",)) == []


def test_the_command_line_loads_nothing_heavy() -> None:
    assert _first_to_load(("ingot", "ingot.cli.app"), CLI_FREE) == []


def test_waiting_for_ranks_loads_no_recipe() -> None:
    """Whoever starts ranks on this machine waits beside them for as long as they run."""
    light = ("ingot.launch.places.local", "ingot.launch.attempt")
    assert _first_to_load(light, ("pydantic", "yaml", "httpx")) == []
