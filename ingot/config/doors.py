"""Doors: extension points for named kinds (objectives, optimizers, places, ...), and the table of
every built-in kind with its dotted path.

A new kind is one new file and one line here; nothing registers itself on import. Other packages add
kinds by entry points in the group `ingot.plugins`, which are read only when a kind is not built in
or when kinds are listed; see docs/EXTENDING.md.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.storage import sha256_file

BUILT_IN: dict[str, dict[str, str]] = {
    # Settings (ingot.config.sections.objective.ObjectiveSettings); `objective.kind`.
    "objective": {
        "pretrain": "ingot.config.sections.objective:PretrainSettings",
        "sft": "ingot.config.sections.objective:SFTSettings",
        "dpo": "ingot.config.sections.objective:DPOSettings",
        "ipo": "ingot.config.sections.objective:IPOSettings",
        "simpo": "ingot.config.sections.objective:SimPOSettings",
        "orpo": "ingot.config.sections.objective:ORPOSettings",
        "kto": "ingot.config.sections.objective:KTOSettings",
        "reward": "ingot.config.sections.objective:RewardModelSettings",
        "grpo": "ingot.config.sections.grpo:GRPOSettings",
        "distill": "ingot.config.sections.objective:DistillSettings",
        "seq2seq": "ingot.config.sections.objective:Seq2SeqSettings",
        "classify": "ingot.config.sections.objective:ClassifySettings",
        "mlm": "ingot.config.sections.mlm:MLMSettings",
        "span_corruption": "ingot.config.sections.spans:SpanCorruptionSettings",
    },
    # Settings (ingot.config.sections.training.OptimizerSettings); `train.optimizer.kind`.
    "optimizer": {
        "adamw": "ingot.config.sections.training:AdamW",
        "sgd": "ingot.config.sections.training:SGD",
        "muon": "ingot.config.sections.training:Muon",
    },
    # Settings (ingot.config.sections.training.ScheduleSettings); `train.schedule.kind`.
    "schedule": {
        "cosine": "ingot.config.sections.training:CosineSchedule",
        "linear": "ingot.config.sections.training:LinearSchedule",
        "constant": "ingot.config.sections.training:ConstantSchedule",
        "wsd": "ingot.config.sections.training:WSDSchedule",
    },
    # Kinds of sources (ingot.data.sources.kind.SourceKind) by the scheme in `data.train[].source`,
    # such as `hf` in `hf:NAME`. A path has no scheme.
    "source": {
        "hf": "ingot.data.sources.hub:HubSource",
        "wikipedia": "ingot.data.sources.wikipedia:WikipediaSource",
        "bigquery": "ingot.data.sources.bigquery:BigQuerySource",
        "megatron": "ingot.data.sources.megatron:MegatronSource",
        "builtin": "ingot.data.sources.local_files:BuiltIn",
    },
    # Settings (ingot.config.sections.data.CleaningSettings); `data.clean.steps[].kind`. ingot's own
    # steps are knobs of `data.clean`.
    "clean": {},
    # Settings (ingot.config.sections.evaluation.TaskSettings); `evaluate.tasks[].kind`.
    "task": {
        "loss": "ingot.config.sections.evaluation:LossTask",
        "hellaswag": "ingot.config.sections.evaluation:HellaSwagTask",
        "choice": "ingot.config.sections.evaluation:ChoiceTask",
        "rouge": "ingot.config.sections.evaluation:RougeTask",
        "classification": "ingot.config.sections.evaluation:ClassificationTask",
        "preference": "ingot.config.sections.evaluation:PreferenceTask",
        "reward": "ingot.config.sections.reward_task:RewardTask",
        "lm_eval": "ingot.config.sections.evaluation:LMEvalTask",
    },
    # Settings (ingot.config.sections.rewards.RewardSettings); the `kind` of each of a list of
    # rewards.
    "reward": {
        "exact": "ingot.config.sections.rewards:ExactReward",
        "numeric": "ingot.config.sections.rewards:NumericReward",
        "regex": "ingot.config.sections.rewards:RegexReward",
        "json_schema": "ingot.config.sections.rewards:JsonSchemaReward",
        "length": "ingot.config.sections.rewards:LengthReward",
        "classifier": "ingot.config.sections.rewards:ClassifierReward",
        "python": "ingot.config.sections.rewards:PythonReward",
        "http": "ingot.config.sections.rewards:HttpReward",
        "code": "ingot.config.sections.rewards:CodeReward",
    },
    # Settings (ingot.config.sections.deployment.GateSettings); `gate.kind`.
    "gate": {"metric": "ingot.config.sections.deployment:MetricGate"},
    # Chat templates (ingot.tokenizers.chats.templates.NamedTemplate: a Jinja file and the tokens it
    # needs) by name; `tokenizer.template`.
    "template": {
        "chatml": "ingot.tokenizers.chats.templates:CHATML",
        "hermes": "ingot.tokenizers.chats.templates:HERMES",
        "llama3": "ingot.tokenizers.chats.templates:LLAMA3",
        "llama2": "ingot.tokenizers.chats.templates:LLAMA2",
        "mistral": "ingot.tokenizers.chats.templates:MISTRAL",
        "zephyr": "ingot.tokenizers.chats.templates:ZEPHYR",
        "alpaca": "ingot.tokenizers.chats.templates:ALPACA",
    },
    # Members of the native decoder family (ingot.config.models.family.FamilyMember) by `model_type`
    # of a Hugging Face configuration.
    "family": {
        "llama": "ingot.config.models.dense:LLAMA",
        "mistral": "ingot.config.models.dense:MISTRAL",
        "ministral3": "ingot.config.models.dense:MINISTRAL3",
        "qwen2": "ingot.config.models.dense:QWEN2",
        "qwen3": "ingot.config.models.dense:QWEN3",
        "gemma3_text": "ingot.config.models.dense:GEMMA3",
        "olmo2": "ingot.config.models.dense:OLMO2",
        "olmo3": "ingot.config.models.dense:OLMO3",
        "smollm3": "ingot.config.models.dense:SMOLLM3",
        "granite": "ingot.config.models.dense:GRANITE",
        "phi3": "ingot.config.models.dense:PHI3",
        "glm4": "ingot.config.models.dense:GLM4",
        "exaone4": "ingot.config.models.dense:EXAONE4",
        "seed_oss": "ingot.config.models.dense:SEED_OSS",
        "mixtral": "ingot.config.models.mixtures:MIXTRAL",
        "qwen3_moe": "ingot.config.models.mixtures:QWEN3_MOE",
        "gpt_oss": "ingot.config.models.mixtures:GPT_OSS",
        "minimax_m2": "ingot.config.models.mixtures:MINIMAX_M2",
        "glm4_moe": "ingot.config.models.mixtures:GLM4_MOE",
        "olmoe": "ingot.config.models.mixtures:OLMOE",
    },
    # Launchers (ingot.launch.job.Launcher), called with the recipe; `launch.kind`. For `local`,
    # what starts the processes of a job on this machine.
    "place": {
        "local": "ingot.launch.places.local:foreground",
        "ssh": "ingot.launch.places.ssh:SshLauncher",
        "slurm": "ingot.launch.places.slurm:SlurmLauncher",
        "gce": "ingot.launch.places.gce:GceLauncher",
        "vertex": "ingot.launch.places.vertex:VertexLauncher",
        "tpu": "ingot.launch.places.tpu:TpuLauncher",
        "dataproc": "ingot.launch.places.dataproc:DataprocLauncher",
        "dataflow": "ingot.launch.places.dataflow:DataflowLauncher",
    },
}
"""Door -> kind -> dotted path `module:attribute`."""


GROUP = "ingot.plugins"
"""The group of entry points; the name of each is `DOOR.KIND`, such as `objective.slic`."""
SETTLED_NS = 2_000_000_000
"""A file that was changed within this time is read anew: clocks of file systems are coarse, and
another change may leave the same time.
"""


@dataclass(frozen=True)
class Door:
    """One extension point: its name, and the dotted path `module:attribute` of each
    built-in kind.
    """

    name: str
    built_in: Mapping[str, str] = field(hash=False)

    def find(self, kind: str) -> Any | None:
        """The object registered for a kind, imported now; None if neither ingot nor an installed
        package provides it.

        Raises:
            WrongInput: an installed package provides it, but it cannot be imported.
        """
        if kind in self.built_in:
            return load_dotted(self.built_in[kind])
        entry = self.installed().get(kind)
        return None if entry is None else _load_entry(entry)

    def load(self, kind: str, knob: str) -> Any:
        """The object registered for the kind that the knob `knob` names.

        Raises:
            WrongInput: there is no such kind (the nearest one is suggested), or its package cannot
                be imported.
        """
        found = self.find(kind)
        if found is None:
            raise WrongInput(f"{knob} is {kind!r}; it should be {self.expected(kind)}")
        return found

    def kinds(self) -> list[str]:
        """All kinds: the built-in ones, then those of installed packages."""
        return [*self.built_in, *self.installed()]

    def expected(self, kind: str) -> str:
        """`one of 'a', 'b'`, with the likely intended one for an unknown kind."""
        kinds = self.kinds()
        if not kinds:
            return "a kind that an installed package brings, and none brings any"
        near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.6)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return "one of " + ", ".join(f"'{each}'" for each in kinds) + hint

    def package_of(self, kind: str) -> str | None:
        """`NAME VERSION` of the installed package that provides a kind; None for a built-in one."""
        entry = None if kind in self.built_in else self.installed().get(kind)
        dist = None if entry is None else entry.dist
        return None if dist is None else f"{dist.name} {dist.version}"

    def code_of(self, kind: str) -> str | None:
        """`NAME VERSION (DIGITS)` of that package: what it is and, by digits of a hash, what stands
        in its files now, which may be edited under the same version.
        """
        package = self.package_of(kind)
        if package is None:
            return None
        return f"{package} ({_code_digest(self.installed()[kind])[:8]})"

    def installed(self) -> dict[str, EntryPoint]:
        """The kinds that other packages provide. A built-in kind cannot be replaced."""
        found: dict[str, EntryPoint] = {}
        for entry in _entries(tuple(sys.path)):
            door, _, kind = entry.name.partition(".")
            if door != self.name or kind in self.built_in:
                continue
            if kind in found and found[kind].value != entry.value:
                raise WrongInput(
                    f"two installed packages bring {entry.name}: {found[kind].value} and"
                    f" {entry.value}; uninstall one of them"
                )
            found[kind] = entry
        return found


@functools.cache
def _entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """All entry points of the group, read once per `sys.path`."""
    return tuple(entry_points(group=GROUP))


def _code_digest(entry: EntryPoint) -> str:
    """A fingerprint of all files of the package that an entry point is in, chat templates and word
    lists among them, and of the modules beside it that are of the same distribution.

    Left out are what Python compiled and names that begin with a dot, such as an editor's.
    """
    own = _located(entry.module)
    if own is None:
        return fingerprint({})
    places, begin = {own, *_beside(entry, own.parent)}, len(str(own.parent))
    # Of ten thousand files, as texts: paths would take ten times as long as to look at them.
    return fingerprint({file[begin:]: _digest(file) for at in places for file in _files_of(at)})


def _located(module: str) -> Path | None:
    """The folder of the package that a module is in, or its file if it is in none. A namespace is
    passed over: others share it.
    """
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.has_location and spec.origin is not None:
            file = Path(spec.origin)
            return file.parent if file.name == "__init__.py" else file
    return None


def _beside(entry: EntryPoint, folder: Path) -> Iterator[Path]:
    """The entries directly in `folder` that the distribution of an entry point owns: by its list of
    files, and by the names of its modules, since an editable installation lists no files.
    """
    if entry.dist is None:
        return
    for file in entry.dist.files or ():
        path = Path(os.path.normpath(str(entry.dist.locate_file(file))))
        if path.is_relative_to(folder) and path != folder:
            name = path.relative_to(folder).parts[0]
            if not name.endswith((".dist-info", ".egg-info")):
                yield folder / name
    for name in (entry.dist.read_text("top_level.txt") or "").split():
        yield from (folder / name, folder / f"{name}.py")


def _files_of(place: Path) -> Iterator[str]:
    if place.is_file():
        yield str(place)
    for folder, inner, names in os.walk(place):
        inner[:] = [name for name in inner if _is_own(name)]
        yield from (os.path.join(folder, name) for name in names if _is_own(name))


def _is_own(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__" and not name.endswith(".pyc")


def _digest(file: str) -> str | None:
    """The hash of a file as it is now; None of what cannot be read."""
    try:
        now = os.stat(file)
        if not stat.S_ISREG(now.st_mode):
            return None
        if time.time_ns() - now.st_mtime_ns < SETTLED_NS:
            return sha256_file(file)
        return _digest_at(file, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    except OSError:
        return None


@functools.cache
def _digest_at(file: str, size: int, *times: int) -> str:
    """The hash of a file of this size and these times: a recipe asks for it at every verb."""
    return sha256_file(file)


def _load_entry(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever the package's own code raises as it is imported
        package = "an installed package" if entry.dist is None else entry.dist.name
        raise WrongInput(
            f"{entry.name} = {entry.value} of {package} cannot be imported"
            f" ({type(error).__name__}: {error}); mend or reinstall the package"
        ) from error


def load_dotted(path: str) -> Any:
    """The attribute that `package.module:attribute` names."""
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


OBJECTIVES = Door("objective", BUILT_IN["objective"])
OPTIMIZERS = Door("optimizer", BUILT_IN["optimizer"])
SCHEDULES = Door("schedule", BUILT_IN["schedule"])
SOURCES = Door("source", BUILT_IN["source"])
CLEANING = Door("clean", BUILT_IN["clean"])
TASKS = Door("task", BUILT_IN["task"])
REWARDS = Door("reward", BUILT_IN["reward"])
GATES = Door("gate", BUILT_IN["gate"])
TEMPLATES = Door("template", BUILT_IN["template"])
FAMILIES = Door("family", BUILT_IN["family"])
PLACES = Door("place", BUILT_IN["place"])


def packages_of(kinds: Iterable[tuple[Door, str]]) -> dict[str, str]:
    """`package.DOOR.KIND` -> `NAME VERSION (DIGITS)` for those kinds that come from other packages.
    It counts as a knob of the steps that use them, since other code of a package may give another
    result.
    """
    named = [(door, kind) for door, kind in kinds if kind]
    found = {f"package.{door.name}.{kind}": door.code_of(kind) for door, kind in named}
    return {key: package for key, package in found.items() if package is not None}
