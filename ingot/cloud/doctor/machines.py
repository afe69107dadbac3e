"""Checks of the machines that a recipe will request: whether their types exist in its zones, and
whether the quota suffices.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from ingot.cloud.clients import call_api, call_or_none
from ingot.cloud.doctor.context import CheckContext, MachineDemand
from ingot.cloud.doctor.finding import DoctorFinding
from ingot.cloud.machines import accelerator_name, zones_of

_SHARED_CPUS = {"n1", "e2", "f1", "g1"}
_GPU_METRICS = {
    "nvidia-h100-80gb": "NVIDIA_H100",
    "nvidia-h100-mega-80gb": "NVIDIA_H100_MEGA",
    "nvidia-h200-141gb": "NVIDIA_H200",
    "nvidia-b200": "NVIDIA_B200",
}


def accelerator_of(name: str) -> str:
    """Compute Engine's name of an accelerator given in either spelling; unchanged if unknown."""
    return accelerator_name(name) or name


def metric_of(accelerator: str) -> str:
    """Compute Engine's quota metric for an accelerator."""
    plain = _GPU_METRICS.get(accelerator) or accelerator.upper().replace("-", "_").replace(
        "TESLA_", ""
    )
    return f"{plain}_GPUS"


def types(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check that machine type and accelerator both exist in at least one of the zones."""
    for demand in site.needs.machines:
        yield from _types(site, demand)


def _types(site: CheckContext, demand: MachineDemand) -> Iterator[DoctorFinding]:
    zones, kind = zones_of(site.google.cloud), demand.machine.type
    where = ", ".join(zones)
    having = [zone for zone in zones if _machine(site, zone, kind) is not None]
    what = f"machine type {kind} ({demand.why})"
    if having:
        yield DoctorFinding(what, True, f"in {', '.join(having)}")
    else:
        near = _nearest(site, "machine types", kind, zones)
        get = (
            f"gcloud compute machine-types list --zones={','.join(zones)} --project={site.project}"
        )
        yield DoctorFinding(
            what,
            False,
            f"not in {where}{near}",
            f"{get}   # then set {demand.why}.type, or cloud.zone",
            needed=True,
        )
    if demand.machine.accelerator is None:
        return
    name = accelerator_of(demand.machine.accelerator)
    client = site.google.client("accelerator types")
    with_it = [
        zone
        for zone in zones
        if call_or_none(
            client.get,
            f"look for {name}",
            request={"project": site.project, "zone": zone, "accelerator_type": name},
        )
        is not None
    ]
    both = [zone for zone in with_it if zone in having] if having else with_it
    status = (
        f"in {', '.join(both)}"
        if both
        else (
            f"in {', '.join(with_it)}, where {kind} is not"
            if with_it
            else (f"not in {where}{_nearest(site, 'accelerator types', name, zones)}")
        )
    )
    get = (
        f"gcloud compute accelerator-types list --project={site.project}   # then set"
        f" {demand.why}.accelerator, cloud.zone or cloud.region"
    )
    yield DoctorFinding(f"accelerator {name} ({demand.why})", bool(both), status, get, needed=True)


def _machine(site: CheckContext, zone: str, kind: str) -> object | None:
    request = {"project": site.project, "zone": zone, "machine_type": kind}
    found: object | None = call_or_none(
        site.google.client("machine types").get,
        f"look for the machine type {kind}",
        request=request,
    )
    return found


def _nearest(site: CheckContext, service: str, name: str, zones: list[str]) -> str:
    known: set[str] = set()
    for zone in zones:
        listed = call_or_none(
            site.google.client(service).list,
            f"list the {service}",
            request={"project": site.project, "zone": zone},
        )
        known |= {item.name for item in listed or ()}
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; near are {', '.join(near)}" if near else ""


def quotas(site: CheckContext) -> Iterator[DoctorFinding]:
    """Check that the free quota of Compute Engine for CPUs and GPUs covers each demand of the
    recipe, one by one.
    """
    lent = [demand for demand in site.needs.machines if demand.place == "gce"]
    if any(demand.place == "vertex" for demand in site.needs.machines):
        get = (
            "gcloud beta quotas info list --service=aiplatform.googleapis.com"
            f" --project={site.project} --filter='quotaId~Custom'"
        )
        yield DoctorFinding(
            "quota of Vertex AI", None, "not asked: Vertex AI counts its machines by itself", get
        )
    if not lent:
        return
    region = call_api(
        site.google.client("regions").get,
        "read the quotas",
        request={"project": site.project, "region": site.region},
    )
    everywhere = call_api(
        site.google.client("compute projects").get,
        "read the project's quotas",
        request={"project": site.project},
    )
    limits = {quota.metric: (quota.limit, quota.usage) for quota in region.quotas}
    worldwide = {quota.metric: (quota.limit, quota.usage) for quota in everywhere.quotas}
    for demand in lent:
        for metric, count in _amounts(site, demand).items():
            if metric == "GPUS_ALL_REGIONS":
                yield _quota(site, demand, metric, count, worldwide)
                continue
            spare = f"PREEMPTIBLE_{metric}"
            # Spot machines count against the ordinary quota if the project has no spot quota.
            yield _quota(
                site,
                demand,
                spare if demand.machine.spot and limits.get(spare, (0, 0))[0] > 0 else metric,
                count,
                limits,
            )


def _amounts(site: CheckContext, demand: MachineDemand) -> dict[str, int]:
    """The amount that a demand's machines take from each quota metric. {} if no zone has the
    machine type, which another check reports.
    """
    machine = next(
        (
            found
            for zone in zones_of(site.google.cloud)
            if (found := _machine(site, zone, demand.machine.type)) is not None
        ),
        None,
    )
    if machine is None:
        return {}
    family = demand.machine.type.split("-")[0]
    quota = "CPUS" if family in _SHARED_CPUS else f"{family.upper()}_CPUS"
    amounts = {quota: demand.count * machine.guest_cpus}  # type: ignore[attr-defined]
    accelerators = machine.accelerators  # type: ignore[attr-defined]
    gpus = {item.guest_accelerator_type: item.guest_accelerator_count for item in accelerators}
    if demand.machine.accelerator:
        gpus[accelerator_of(demand.machine.accelerator)] = max(1, demand.machine.accelerators)
    for name, count in gpus.items():
        amounts[metric_of(name)] = demand.count * count
    if gpus:
        amounts["GPUS_ALL_REGIONS"] = demand.count * sum(gpus.values())
    return amounts


def _quota(
    site: CheckContext,
    demand: MachineDemand,
    metric: str,
    count: int,
    limits: dict[str, tuple[float, float]],
) -> DoctorFinding:
    what = f"quota {metric} ({demand.why})"
    worldwide = metric == "GPUS_ALL_REGIONS"
    name = metric.replace("_", "-") + ("-per-project" if worldwide else "-per-project-region")
    where = "" if worldwide else f" --dimensions=region={site.region}"
    if metric not in limits:
        get = (
            "gcloud beta quotas info list --service=compute.googleapis.com"
            f" --project={site.project} --filter='quotaId~{metric.replace('_', '-')}'"
        )
        return DoctorFinding(what, None, f"{count} needed; Compute Engine tells no limit", get)
    limit, usage = limits[metric]
    enough = limit - usage >= count
    get = (
        f"gcloud beta quotas preferences create --service=compute.googleapis.com --quota-id={name}"
        f" --preferred-value={math.ceil(usage) + count}{where} --project={site.project}"
    )
    return DoctorFinding(
        what,
        enough,
        f"{count} needed, {max(0.0, limit - usage):g} of {limit:g} free",
        get,
        needed=True,
    )
