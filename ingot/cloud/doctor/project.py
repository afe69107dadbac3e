"""Checks of the project itself: whether it exists, which services are enabled, and the permissions
of the caller and the jobs' service account.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ingot.base.errors import WrongInput
from ingot.cloud.clients import call_api
from ingot.cloud.doctor.context import APIS, CALLER, CheckContext, Use
from ingot.cloud.doctor.finding import DoctorFinding

ACCOUNT_ROLES: dict[str, tuple[str, tuple[Use, ...]]] = {
    "roles/bigquery.jobUser": ("BigQuery Job User", ("bigquery",)),
    "roles/dataproc.worker": ("Dataproc Worker", ("dataproc",)),
    "roles/dataflow.worker": ("Dataflow Worker", ("dataflow",)),
    "roles/aiplatform.user": ("Vertex AI User", ("vertex",)),
    "roles/secretmanager.secretAccessor": ("Secret Manager Secret Accessor", ("secrets",)),
    "roles/artifactregistry.writer": ("Artifact Registry Writer", ("images",)),
    "roles/logging.logWriter": (
        "Logs Writer",
        ("compute", "vertex", "dataproc", "dataflow", "tpu"),
    ),
    "roles/compute.instanceAdmin.v1": ("Compute Instance Admin (v1)", ("compute",)),
    "roles/tpu.admin": ("TPU Admin", ("tpu",)),
}
"""The roles that the jobs' service account needs; with the last two, machines delete themselves. No
job starts a build; images are built by the user.
"""
BROADER: dict[str, set[str]] = {
    "roles/owner": set(ACCOUNT_ROLES),
    "roles/editor": set(ACCOUNT_ROLES) - {"roles/secretmanager.secretAccessor"},
    "roles/bigquery.admin": {"roles/bigquery.jobUser"},
    "roles/bigquery.user": {"roles/bigquery.jobUser"},
    "roles/aiplatform.admin": {"roles/aiplatform.user"},
    "roles/secretmanager.admin": {"roles/secretmanager.secretAccessor"},
    "roles/artifactregistry.admin": {"roles/artifactregistry.writer"},
    "roles/artifactregistry.repoAdmin": {"roles/artifactregistry.writer"},
    "roles/logging.admin": {"roles/logging.logWriter"},
    "roles/compute.admin": {"roles/compute.instanceAdmin.v1"},
}
"""Roles that include others."""
CALLER_MAY: dict[str, tuple[str, str, tuple[Use, ...]]] = {
    "cloudbuild.builds.create": (
        "Cloud Build Editor",
        "roles/cloudbuild.builds.editor",
        ("images",),
    ),
    "bigquery.jobs.create": ("BigQuery Job User", "roles/bigquery.jobUser", ("bigquery",)),
    "compute.instances.create": (
        "Compute Instance Admin (v1)",
        "roles/compute.instanceAdmin.v1",
        ("compute",),
    ),
    "dataproc.batches.create": ("Dataproc Editor", "roles/dataproc.editor", ("dataproc",)),
    "dataflow.jobs.create": ("Dataflow Developer", "roles/dataflow.developer", ("dataflow",)),
    "aiplatform.customJobs.create": ("Vertex AI User", "roles/aiplatform.user", ("vertex",)),
    "tpu.nodes.create": ("TPU Admin", "roles/tpu.admin", ("tpu",)),
}


def project(site: CheckContext) -> Iterator[DoctorFinding]:
    what = f"project {site.project}"
    try:
        number = site.number
    except WrongInput as error:
        # Google answers the same for a project that does not exist and one that may not be seen.
        text = str(error).rpartition(";")[0]
        disabled = "has not been used" in text or "is disabled" in text
        get = (
            f"gcloud services enable cloudresourcemanager.googleapis.com --project={site.project}"
            if disabled
            else "gcloud projects list"
        )
        yield DoctorFinding(what, None if disabled else False, text, get, needed=not disabled)
        return
    yield DoctorFinding(what, True, f"number {number}")


def services(site: CheckContext) -> Iterator[DoctorFinding]:
    """Required services must be enabled; the other common ones are listed as well."""
    listed = [
        name
        for name, (_, uses) in APIS.items()
        if name not in ("dataflow.googleapis.com", "tpu.googleapis.com") or site.needs.why(uses)
    ]
    answer = call_api(
        site.google.client("services").batch_get_services,
        "ask which services are on",
        request={
            "parent": f"projects/{site.project}",
            "names": [f"projects/{site.project}/services/{name}" for name in listed],
        },
    )
    states = {service.name.rpartition("/")[2]: service.state.name for service in answer.services}
    for name in listed:
        title, uses = APIS[name]
        why = site.needs.why(uses)
        on = states.get(name) == "ENABLED"
        get = f"gcloud services enable {name} --project={site.project}"
        yield DoctorFinding(
            f"service {title}", on, "on" if on else _off(why), get, needed=why is not None
        )


def _off(why: str | None) -> str:
    return f"not enabled, and {why} needs it" if why else "not enabled; this recipe does without it"


def account_roles(site: CheckContext) -> Iterable[DoctorFinding]:
    """The roles that the project grants the jobs' account. Those inherited from a folder or an
    organisation are not visible here.
    """
    account = site.account
    policy = call_api(
        site.google.client("projects").get_iam_policy,
        "read who may do what",
        resource=f"projects/{site.project}",
    )
    member = f"serviceAccount:{account}"
    granted = {
        binding.role
        for binding in policy.bindings
        if member in binding.members and not binding.condition.expression
    }
    granted |= {role for broad in granted for role in BROADER.get(broad, ())}
    for role, (title, uses) in ACCOUNT_ROLES.items():
        why = site.needs.why(uses)
        if not why:
            continue
        get = (
            f"gcloud projects add-iam-policy-binding {site.project} --member={member} --role={role}"
            " --condition=None"
        )
        has = role in granted
        found = (
            "granted"
            if has
            else (
                f"not granted by the project, and {why} needs it (one that a folder or an"
                " organisation grants is not seen here)"
            )
        )
        yield DoctorFinding(f"{account}: {title}", has, found, get, needed=True)


def caller_rights(site: CheckContext) -> Iterable[DoctorFinding]:
    """The caller's permissions, wherever they come from."""
    wanted = {name: about for name, about in CALLER_MAY.items() if site.needs.why(about[2])}
    if not wanted:
        return
    answer = call_api(
        site.google.client("projects").test_iam_permissions,
        "ask what you may do",
        resource=f"projects/{site.project}",
        permissions=sorted(wanted),
    )
    for name, (title, role, uses) in wanted.items():
        has = name in answer.permissions
        get = (
            f"gcloud projects add-iam-policy-binding {site.project} --member={CALLER} --role={role}"
            " --condition=None"
        )
        yield DoctorFinding(
            f"you: {title}",
            has,
            f"{name}" if has else f"you lack {name}, and {site.needs.why(uses)} needs it",
            get,
            needed=True,
        )


def acting(site: CheckContext) -> Iterable[DoctorFinding]:
    """Starting jobs that run as an account requires the permission to act as it."""
    if (
        site.needs.why(("compute", "vertex", "dataproc", "dataflow", "tpu")) is None
        or "@gcp-sa-" in site.account
    ):
        return  # service agents need no such permission
    answer = call_api(
        site.google.client("projects").test_iam_permissions,
        "ask whether you may act as the account",
        resource=f"projects/{site.project}",
        permissions=["iam.serviceAccounts.actAs"],
    )
    account = site.account
    get = (
        f"gcloud iam service-accounts add-iam-policy-binding {account} --member={CALLER}"
        f" --role=roles/iam.serviceAccountUser --project={site.project}"
    )
    has = "iam.serviceAccounts.actAs" in answer.permissions
    # The permission may be granted on the account alone, which the project's policy does not show.
    yield DoctorFinding(
        f"you: act as {account}",
        True if has else None,
        "may be acted as" if has else "not granted by the project; the account itself may",
        get,
    )
