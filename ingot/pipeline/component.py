"""The components of the compiled pipeline. Their source is what runs in the containers: Kubeflow
sends it along, without this file's imports.
"""

from typing import NamedTuple


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
