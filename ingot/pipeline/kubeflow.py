"""The pipeline in the language of Kubeflow Pipelines (KFP v2), compiled by its own compiler. The
same recipe gives the same bytes.

A lightweight component for each step, strings between them, a condition on what the gate decided.
Kubeflow's cache is off: each step knows by its record in the run folder whether anything changed.
"""

# No `from __future__ import annotations`: kfp reads the types of the pipeline's parameters as they
# are.
import os
from typing import Any, NamedTuple

import yaml

from ingot.base.errors import WrongInput
from ingot.cloud.clients import message_types
from ingot.cloud.instances import resource_name
from ingot.pipeline.plan import DEPLOYS, GATED, Plan, Planned


def step(
    verb: str, recipe: str, replica: str, after: str, place: str, submission: str
) -> NamedTuple("Done", [("replica", str), ("fingerprint", str)]):  # type: ignore[valid-type]
    """Do one step of the recipe by ingot's command line; where the run lies, and a fingerprint of
    what was made.
    """
    from ingot.pipeline.container import do

    done = do(verb, recipe, replica, place, submission)
    return done.replica, done.fingerprint


def gate(verb: str, recipe: str, replica: str, after: str, place: str, submission: str) -> str:
    """The same, and what was decided: deploy or keep. One output alone, since Kubeflow's local
    runner can decide by no other.
    """
    from ingot.pipeline.container import do

    return do(verb, recipe, replica, place, submission).decision


INSIDE = "_KFP_RUNTIME"
"""By this variable kfp knows that it is in a container of a pipeline."""
PAUSE, FACTOR, LONGEST = "60s", 2.0, "600s"
"""Before a failed step is tried again: first, how it grows, at most."""


def compiled(plan: Plan) -> dict[str, Any]:
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


def text_of(spec: dict[str, Any]) -> str:
    """A specification as a file of it."""
    return yaml.safe_dump(spec, sort_keys=True, width=150)


def _task(dsl: Any, plan: Plan, planned: Planned, recipe: Any, replica: Any, after: Any) -> Any:
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
    if plan.retries:
        task.set_retry(plan.retries, PAUSE, FACTOR, LONGEST)
    if (wanted := planned.resources) is not None:
        task.set_cpu_limit(str(wanted.cpus)).set_memory_limit(
            f"{int(wanted.memory_gb * 1000)}M"
        )  # kfp takes whole numbers alone
        if wanted.accelerator is not None:
            task.set_accelerator_type(wanted.accelerator).set_accelerator_limit(wanted.accelerators)
    return task


def _dsl() -> Any:
    """kfp's language, without its client, which brings that of Kubernetes and a second and a half:
    in its containers kfp leaves both out.
    """
    before = os.environ.get(INSIDE)
    os.environ[INSIDE] = "true"
    try:
        import kfp as _  # noqa: F401
    except ImportError as error:
        raise WrongInput("compiling the pipeline needs kfp; pip install 'ingot[kfp]'") from error
    finally:
        if before is None:
            del os.environ[INSIDE]
        else:
            os.environ[INSIDE] = before
    from kfp import dsl

    return dsl
