"""The registry of extension points ("doors"): every built-in kind, and where its code is.

A new kind is one new file and one line here; nothing registers itself on import. Other packages add
kinds by entry points in the group `ingot.plugins`; see docs/EXTENDING.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingot.base.doors import Door

BUILT_IN: dict[str, dict[str, str]] = {
    # Settings (ingot.config.sections.objective.ObjectiveSettings); `objective.kind`.
    "objective": {
        "pretrain": "ingot.config.sections.objective:PretrainSettings",
        "sft": "ingot.config.sections.objective:SFTSettings",
        "dpo": "ingot.config.sections.objective:DPOSettings",
        "distill": "ingot.config.sections.objective:DistillSettings",
        "seq2seq": "ingot.config.sections.objective:Seq2SeqSettings",
        "classify": "ingot.config.sections.objective:ClassifySettings",
    },
    # Settings (ingot.config.sections.training.OptimizerSettings); `train.optimizer.kind`.
    "optimizer": {
        "adamw": "ingot.config.sections.training:AdamW",
        "sgd": "ingot.config.sections.training:SGD",
    },
    # Settings (ingot.config.sections.training.ScheduleSettings); `train.schedule.kind`.
    "schedule": {
        "cosine": "ingot.config.sections.training:CosineSchedule",
        "linear": "ingot.config.sections.training:LinearSchedule",
        "constant": "ingot.config.sections.training:ConstantSchedule",
    },
    # Kinds of sources (ingot.data.sources.kind.SourceKind) by the scheme in `data.train[].source`,
    # such as `hf` in `hf:NAME`. A path has no scheme.
    "source": {
        "hf": "ingot.data.sources.hub:HubSource",
        "wikipedia": "ingot.data.sources.wikipedia:WikipediaSource",
        "bigquery": "ingot.data.sources.bigquery:BigQuerySource",
        "megatron": "ingot.data.sources.megatron:MegatronSource",
        "builtin": "ingot.data.sources.local_files:StandardLibrary",
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
        "lm_eval": "ingot.config.sections.evaluation:LMEvalTask",
    },
    # Settings (ingot.config.sections.deployment.GateSettings); `gate.kind`.
    "gate": {"metric": "ingot.config.sections.deployment:MetricGate"},
    # Chat templates (ingot.tokenizers.chat_templates.NamedTemplate: a Jinja file and the tokens it
    # needs) by name; `tokenizer.template`.
    "template": {
        "chatml": "ingot.tokenizers.chat_templates:CHATML",
        "llama3": "ingot.tokenizers.chat_templates:LLAMA3",
        "llama2": "ingot.tokenizers.chat_templates:LLAMA2",
        "mistral": "ingot.tokenizers.chat_templates:MISTRAL",
        "zephyr": "ingot.tokenizers.chat_templates:ZEPHYR",
        "alpaca": "ingot.tokenizers.chat_templates:ALPACA",
    },
    # Members of the native decoder family (ingot.config.family.FamilyMember) by `model_type` of a
    # Hugging Face configuration.
    "family": {
        "llama": "ingot.config.family:LLAMA",
        "mistral": "ingot.config.family:MISTRAL",
        "qwen2": "ingot.config.family:QWEN2",
        "qwen3": "ingot.config.family:QWEN3",
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

OBJECTIVES = Door("objective", BUILT_IN["objective"])
OPTIMIZERS = Door("optimizer", BUILT_IN["optimizer"])
SCHEDULES = Door("schedule", BUILT_IN["schedule"])
SOURCES = Door("source", BUILT_IN["source"])
CLEANING = Door("clean", BUILT_IN["clean"])
TASKS = Door("task", BUILT_IN["task"])
GATES = Door("gate", BUILT_IN["gate"])
TEMPLATES = Door("template", BUILT_IN["template"])
FAMILIES = Door("family", BUILT_IN["family"])
PLACES = Door("place", BUILT_IN["place"])


def packages_of(kinds: Iterable[tuple[Door, str]]) -> dict[str, str]:
    """`package.DOOR.KIND` -> `NAME VERSION` for those kinds that come from other packages. It
    counts as a knob of the steps that use them, since another version of a package may give another
    result.
    """
    named = [(door, kind) for door, kind in kinds if kind]
    found = {f"package.{door.name}.{kind}": door.package_of(kind) for door, kind in named}
    return {key: package for key, package in found.items() if package is not None}
