"""lm-evaluation-harness itself on local items: a task of ours that has its own task's settings,
without the hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

HELLASWAG = """
task: local_hellaswag
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
output_type: multiple_choice
validation_split: validation
process_docs: !function {utils}.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


def local_hellaswag(folder: Path, items: Path) -> Path:
    """A folder with the task `local_hellaswag` over `items`; how items are prepared is the
    package's own function.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "theirs.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs\n")
    (folder / "local_hellaswag.yaml").write_text(HELLASWAG.format(path=items, utils="theirs"))
    return folder


def evaluated(model: Path, tasks: Path, *names: str, **settings: Any) -> dict[str, Any]:
    """Results of the harness's own Hugging Face model on local tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=8)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        model=theirs, tasks=list(names), task_manager=manager, bootstrap_iters=0, **settings
    )
    assert found is not None
    return dict(found)


def likelihoods(results: dict[str, Any], name: str) -> list[list[float]]:
    """For each item the log-likelihoods of its choices, in the order of items."""
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    return [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
