"""Compiles the pipeline into a Kubeflow Pipelines specification (KFP v2); the same recipe always
gives the same bytes.

Each step is a lightweight component; components pass strings to each other, and a condition reads
the gate's decision. Kubeflow's cache is off, because each step's record in the run folder already
says whether anything changed.
"""

# No `from __future__ import annotations`: kfp reads the annotations of components and pipeline.
# Kubeflow ships the source of `step` and `gate` to the containers without this module's imports.
import os
from typing import Any, NamedTuple

import yaml

from ingot.base.errors import WrongInput
from ingot.cloud.clients import message_types
from ingot.cloud.instances import resource_name
from ingot.pipeline.plan import DEPLOYS, GATED, PipelinePlan, PlannedStep


def step(
    verb: str, recipe: str, replica: str, after: str, place: str, submission: str
) -> NamedTuple("Done", [("replica", str), ("fingerprint", str)]):  # type: ignore[valid-type]
    """Run one step; returns the run folder's replica and a fingerprint of what was made."""
    from ingot.pipeline.container import run_container_step

    done = run_container_step(verb, recipe, replica, place, submission)
    return done.replica, done.fingerprint


def gate(verb: str, recipe: str, replica: str, after: str, place: str, submission: str) -> str:
    """Run the gate; returns its decision. It has this one output, because conditions of Kubeflow's
    local runner can read no other.
    """
    from ingot.pipeline.container import run_container_step

    return run_container_step(verb, recipe, replica, place, submission).decision


RUNTIME_VARIABLE = "_KFP_RUNTIME"
"""The variable by which kfp knows that it runs in a pipeline's container."""
FIRST_DELAY, BACKOFF_FACTOR, MAX_DELAY = "60s", 2.0, "600s"
"""Delay before a failed step is retried: the first, its growth factor, the longest."""


def compile_pipeline(plan: PipelinePlan) -> dict[str, Any]:
    """The pipeline's specification, as in its file.

    Raises:
        WrongInput: kfp is not installed.
    """
    dsl = _dsl()

    def pipeline(recipe: str = plan.address, replica: str = plan.replica) -> None:
        where, after = replica, ""
        for planned in plan.steps:
            if planned.verb in GATED:
                continue
            task = _task(dsl, plan, planned, recipe, where, after)
            if planned.verb != "gate":
                where, after = task.outputs["replica"], task.outputs["fingerprint"]
        decision = after = task.output
        with dsl.If(decision == DEPLOYS, name="if the gate says deploy"):
            for planned in plan.steps:
                if planned.verb in GATED:
                    task = _task(dsl, plan, planned, recipe, where, after)
                    where, after = task.outputs["replica"], task.outputs["fingerprint"]

    made = dsl.pipeline(name=resource_name(f"ingot-{plan.name}"))(pipeline)
    found: dict[str, Any] = message_types("google.protobuf.json_format").MessageToDict(
        made.pipeline_spec
    )
    return found


def spec_text(spec: dict[str, Any]) -> str:
    """The text of a specification's file."""
    return yaml.safe_dump(spec, sort_keys=True, width=150)


def _task(
    dsl: Any, plan: PipelinePlan, planned: PlannedStep, recipe: Any, replica: Any, after: Any
) -> Any:
    component = dsl.component(
        func=gate if planned.verb == "gate" else step,
        base_image=planned.image,
        install_kfp_package=False,
    )
    component.name = component.component_spec.name = planned.verb
    task = component(
        verb=planned.verb,
        recipe=recipe,
        replica=replica,
        after=after,
        place="\n".join(planned.place),
        submission=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
    )
    task.set_caching_options(False)
    # The credentials of a container are of a project of Google's own, its tenant project.
    task.set_env_variable("GOOGLE_CLOUD_PROJECT", plan.project)
    if plan.retries:
        task.set_retry(plan.retries, FIRST_DELAY, BACKOFF_FACTOR, MAX_DELAY)
    if (resources := planned.resources) is not None:
        task.set_cpu_limit(str(resources.cpus)).set_memory_limit(
            f"{int(resources.memory_gb * 1000)}M"
        )  # kfp takes whole numbers alone
        if resources.accelerator is not None:
            task.set_accelerator_type(resources.accelerator).set_accelerator_limit(
                resources.accelerators
            )
    return task


def _dsl() -> Any:
    """kfp's `dsl` module. It is imported as inside a container, where kfp leaves out its client and
    that of Kubernetes, which cost one and a half seconds.
    """
    before = os.environ.get(RUNTIME_VARIABLE)
    os.environ[RUNTIME_VARIABLE] = "true"
    try:
        import kfp as _  # noqa: F401
    except ImportError as error:
        raise WrongInput("compiling the pipeline needs kfp; pip install 'ingot[kfp]'") from error
    finally:
        if before is None:
            del os.environ[RUNTIME_VARIABLE]
        else:
            os.environ[RUNTIME_VARIABLE] = before
    from kfp import dsl

    return dsl
