"""`ingot doctor --cloud`: is everything there that a recipe needs of Google Cloud? Looks only,
changes nothing.

The checks do not know of each other. One that is denied or fails says so in a line of its own, and
the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ingot.base.errors import IngotError, WrongInput
from ingot.cloud.clients import Google, ask
from ingot.cloud.needs import Needs, needs_of
from ingot.config.recipe import Recipe

AT_ONCE = 8
CALLER = '"user:$(gcloud config get-value account)"'
"""Who runs the check, for a shell: credentials do not tell their name. (A service account would be
`serviceAccount:...`.)
"""


@dataclass(frozen=True)
class Finding:
    """One line. `ok` None: not known. `get` is the command that helps; `needed`: without it the
    recipe cannot do what it says.
    """

    what: str
    ok: bool | None
    found: str
    get: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Site:
    """What the checks look at."""

    recipe: Recipe
    google: Google
    needs: Needs

    @property
    def project(self) -> str:
        return self.google.project

    @property
    def region(self) -> str:
        return self.google.cloud.region

    @cached_property
    def number(self) -> str:
        """The project's number. Raises as `ask` does."""
        found = ask(
            self.google.client("projects").get_project,
            "look at the project",
            name=f"projects/{self.project}",
        )
        return str(found.name).removeprefix("projects/")

    @property
    def account(self) -> str:
        """The service account that jobs run as. Custom jobs of Vertex AI that are given none run as
        an agent of it, all else as Compute Engine's account.
        """
        if given := self.google.cloud.service_account:
            return given
        kinds = {
            self.recipe.launch.kind,
            *(step.launch for step in self.recipe.pipeline.steps.values()),
        }
        if "vertex" in kinds and self.needs.why(("compute", "dataproc", "dataflow", "tpu")) is None:
            return f"service-{self.number}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
        return f"{self.number}-compute@developer.gserviceaccount.com"


Check = Callable[[Site], Iterable[Finding]]


def site_of(recipe: Recipe) -> Site:
    """Raises WrongInput when no project is known, or there are no credentials."""
    google = Google(recipe.cloud)
    _ = google.project
    google.client("projects")
    return Site(recipe, google, needs_of(recipe))


def examine(site: Site, checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """What all checks find, in their order; `checks` are named for the line of one that cannot be
    done.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [
            finding
            for findings in pool.map(lambda check: _guarded(site, *check), list(checks))
            for finding in findings
        ]


def _guarded(site: Site, name: str, check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in check(site):
            found.append(finding)
    except IngotError as error:
        found.append(unknown(site, name, error))
    return found


def there(call: Callable[..., Any], what: str, **request: Any) -> Any | None:
    """What a call of a client gives, None where the service knows no such thing. Raises as `ask`
    does.
    """
    try:
        return ask(call, what, **request)
    except WrongInput as error:
        if getattr(error.__cause__, "code", None) == 404:
            return None
        raise


def unknown(site: Site, what: str, error: IngotError) -> Finding:
    """The line of what could not be looked at."""
    text = str(error).split(": ", 1)[-1].rpartition(";")[0] or str(error)
    denied = "ermission" in text or "denied" in text
    get = (
        f"gcloud projects add-iam-policy-binding {site.project} --member={CALLER}"
        " --role=roles/viewer"
        if denied
        else ""
    )
    return Finding(what, None, f"not known: {text}", get)
