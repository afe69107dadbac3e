"""Checks of resources that must exist in the project: bucket, repository and images, subnetwork,
secrets, TensorBoard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.service import connect, translate_error
from ingot.cloud.clients import call_api, call_or_none
from ingot.cloud.doctor.context import (
    CALLER,
    CheckContext,
    unknown_finding,
)
from ingot.cloud.doctor.finding import DoctorFinding
from ingot.cloud.images import untagged_name
from ingot.cloud.regions import serves_region
from ingot.cloud.secrets import parse_reference, resolve_secrets
from ingot.cloud.vertex.tensorboard import tensorboard_name

BUCKET_S = 20.0
OBJECT_RIGHTS = (
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.objects.list",
)
OBJECT_ROLES = {
    "roles/storage.objectUser",
    "roles/storage.objectAdmin",
    "roles/storage.admin",
    "roles/storage.legacyBucketOwner",
}


def bucket(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check that the bucket exists, is close, and is accessible to the caller and the jobs'
    account.
    """
    name, why = site.google.cloud.bucket, site.needs.why(("storage",))
    make = _make_bucket(site, name or "BUCKET")
    if name is None:
        if why:
            yield DoctorFinding(
                "bucket",
                False,
                f"none is set, and {why} needs one",
                f"{make}   # then set cloud.bucket",
                needed=True,
            )
        return
    what, url = f"bucket gs://{name}", f"gs://{name}"
    client, _ = connect(url)
    try:
        found = client.get_bucket(name, retry=None, timeout=BUCKET_S)
    except Exception as error:
        if getattr(error, "code", None) == 404:
            yield DoctorFinding(what, False, "does not exist", make, needed=True)
        else:
            yield unknown_finding(site, what, translate_error(error, url, "look at", BUCKET_S))
        return
    yield _bucket_nearness(site, found, what)
    yield from _bucket_rights(site, found, what)


def _bucket_nearness(site: CheckContext, found: Any, what: str) -> DoctorFinding:
    """Whether the bucket is where jobs compute."""
    location, regions = found.location or "", tuple(found.data_locations or ())
    near = serves_region(location, site.region, regions)
    where = f"in {'+'.join(regions) or location}"
    return DoctorFinding(
        what,
        near,
        where if near else f"{where}, not where cloud.region {site.region} computes",
        f"{_make_bucket(site, f'{found.name}-{site.region}')}   # or set cloud.region",
        needed=True,
    )


def _make_bucket(site: CheckContext, name: str) -> str:
    return (
        f"gcloud storage buckets create gs://{name} --location={site.region}"
        f" --uniform-bucket-level-access --project={site.project}"
    )


def _bucket_rights(site: CheckContext, found: Any, what: str) -> Iterator[DoctorFinding]:
    """Check the caller's rights on the bucket, and then those of the jobs' account."""
    url = f"gs://{found.name}"
    try:
        lacking = sorted(
            set(OBJECT_RIGHTS)
            - set(found.test_iam_permissions(list(OBJECT_RIGHTS), timeout=BUCKET_S, retry=None))
        )
    except Exception as error:
        yield unknown_finding(
            site, f"{what}: your rights", translate_error(error, url, "look at", BUCKET_S)
        )
        return
    grant = (
        f"gcloud storage buckets add-iam-policy-binding {url} --role=roles/storage.objectUser"
        " --member="
    )
    yield DoctorFinding(
        f"{what}: your rights",
        not lacking,
        "read and write" if not lacking else f"you lack {', '.join(lacking)}",
        grant + CALLER,
        needed=True,
    )
    yield from _bucket_of_account(site, found, what, grant)


def _bucket_of_account(
    site: CheckContext, found: Any, what: str, grant: str
) -> Iterator[DoctorFinding]:
    """Check the account's roles on the bucket and on the project; either suffices."""
    member = f"serviceAccount:{site.account}"
    try:
        bindings = found.get_iam_policy(
            requested_policy_version=3, timeout=BUCKET_S, retry=None
        ).bindings
    except Exception as error:
        yield unknown_finding(
            site,
            f"{what}: rights of {site.account}",
            translate_error(error, f"gs://{site.google.cloud.bucket}", "look at", BUCKET_S),
        )
        return
    policy = call_api(
        site.google.client("projects").get_iam_policy,
        "read who may do what",
        resource=f"projects/{site.project}",
    )
    roles = {binding["role"] for binding in bindings if member in binding["members"]}
    roles |= {binding.role for binding in policy.bindings if member in binding.members}
    has = bool(roles & OBJECT_ROLES)
    yield DoctorFinding(
        f"{what}: rights of {site.account}",
        has,
        "read and write" if has else "may not write there by the bucket's or the project's roles",
        grant + member,
        needed=True,
    )


def repository(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check the repository and the images in it that jobs will run."""
    name, why = site.google.cloud.repository, site.needs.why(("images",))
    make = (
        f"gcloud artifacts repositories create {name or 'ingot'} --repository-format=docker"
        f" --location={site.region} --project={site.project}"
    )
    if name is None:
        if why:
            yield DoctorFinding(
                "repository",
                False,
                f"none is set, and {why} needs its images",
                f"{make}   # then set cloud.repository",
                needed=True,
            )
        return
    client = site.google.client("repositories")
    what = f"repository {name}"
    full = f"{site.google.parent}/repositories/{name}"
    found = call_or_none(
        client.get_repository, f"look at the repository {name}", request={"name": full}
    )
    docker = found is not None and found.format_.name == "DOCKER"
    status = (
        f"in {site.region}"
        if docker
        else (
            f"holds {found.format_.name.lower()}, not Docker images"
            if found
            else f"not in {site.region}"
        )
    )
    yield DoctorFinding(what, docker, status, make, needed=why is not None)
    for kind, reason in site.needs.images.items() if docker else ():
        built = call_or_none(
            client.get_tag,
            f"look for the image ingot-{kind}",
            request={"name": f"{full}/packages/ingot-{kind}/tags/latest"},
        )
        settings = {
            "project": site.project,
            "region": site.region,
            "repository": name,
            "bucket": site.google.cloud.bucket or "BUCKET",
        }
        get = (
            f"ingot images build {kind}"
            f" {' '.join(f'cloud.{knob}={value}' for knob, value in settings.items())}"
        )
        status = "built" if built else f"not built yet, and {reason} runs it"
        yield DoctorFinding(
            f"image {untagged_name(site.google.cloud, kind)}",
            built is not None,
            status,
            get,
            needed=True,
        )


def subnetwork(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check the subnetwork. Machines of managed Spark have no external addresses, and reach
    Google's services only if the subnetwork has Private Google Access.
    """
    name, spark = site.google.cloud.subnetwork, site.needs.why(("dataproc",))
    if name is None and not spark:
        return
    short = (name or "default").rpartition("/")[2]
    place = f"--region={site.region} --project={site.project}"
    found = call_or_none(
        site.google.client("subnetworks").get,
        f"look at the subnetwork {short}",
        request={"project": site.project, "region": site.region, "subnetwork": short},
    )
    what, network = f"subnetwork {short}", site.google.cloud.network or "default"
    if found is None:
        make = (
            f"gcloud compute networks subnets create {short} --network={network}"
            f" --range=10.0.0.0/20 --enable-private-ip-google-access {place}"
        )
        yield DoctorFinding(what, False, f"not in {site.region}", make, needed=True)
        return
    private = bool(found.private_ip_google_access)
    status = "there" + (
        ", with Private Google Access"
        if private
        else ", without Private Google Access" + (f", which {spark} needs" if spark else "")
    )
    get = (
        f"gcloud compute networks subnets update {short} --enable-private-ip-google-access {place}"
    )
    yield DoctorFinding(what, private or not spark, status, get, needed=True)


def secrets(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check that each secret can be read; values are not shown."""
    for variable, reference in site.google.cloud.secrets.items():
        what = f"secret for ${variable}"
        try:
            name, _ = parse_reference(variable, reference)
            resolve_secrets(site.google, {variable: reference})
        except WrongInput as error:
            status, _, get = str(error).rpartition("; ")
            yield DoctorFinding(
                what,
                False,
                status,
                get if get.startswith(("gcloud", "printf")) else "",
                needed=True,
            )
            continue
        except Failed as error:
            yield unknown_finding(site, what, error)
            continue
        yield DoctorFinding(what, True, f"{name} can be read")


def tensorboard(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check the managed TensorBoard, which must be in the region of the jobs."""
    given = site.google.cloud.tensorboard
    if given is None:
        return
    name = tensorboard_name(site.google)
    what = f"TensorBoard {name.rpartition('/')[2]}"
    make = (
        f"gcloud ai tensorboards create --display-name=ingot --region={site.region}"
        f" --project={site.project}   # then set cloud.tensorboard to its id"
    )
    if f"/locations/{site.region}/" not in name:
        yield DoctorFinding(what, False, f"{given} is not in {site.region}", make, needed=True)
        return
    found = call_or_none(
        site.google.client("tensorboards").get_tensorboard,
        "look at the TensorBoard",
        request={"name": name},
    )
    yield DoctorFinding(
        what,
        found is not None,
        f"{found.display_name}, in {site.region}" if found else f"not in {site.region}",
        make,
        needed=True,
    )
