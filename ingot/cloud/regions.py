"""The location of the bucket, and whether a region's machines are close to it: traffic between
regions is slow, and billed at each start.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingot.base.errors import WrongInput
from ingot.base.remote.service import connect
from ingot.cloud.clients import FORBIDDEN, GoogleClients, google_errors, http_status_of
from ingot.config.sections.deployment import Cloud

_CHECK_S = (10.0, 60.0)
"""Timeouts for connecting to Cloud Storage and for its answer."""
# Multi-regions: they contain the regions with these prefixes, except those in `_OUTSIDE`.
_WIDE = {"us": ("us-",), "eu": ("europe-",), "asia": ("asia-",)}
_OUTSIDE = {"europe-west2", "europe-west6"}
# Predefined dual-regions; the regions of a configurable one are in the bucket's metadata.
_PAIRS = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}


def serves_region(location: str, region: str, within: Iterable[str] = ()) -> bool:
    """Whether a bucket in `location` (a region, multi-region or dual-region) is close to machines
    in `region`. `within`: the regions of a configurable dual-region.
    """
    location = location.lower()
    if within := [name.lower() for name in within]:
        return region in within
    if location in _PAIRS:
        return region in _PAIRS[location]
    return location == region or (
        region not in _OUTSIDE
        and any(region.startswith(start) for start in _WIDE.get(location, ()))
    )


def region_mismatch(cloud: Cloud) -> str | None:
    """Why `cloud.bucket` and `cloud.region` do not match, in one line. None if they match, or if
    the bucket's metadata may not be read: permission for objects does not imply that.

    Raises:
        WrongInput: no bucket is set, it does not exist, or there are no credentials.
        Failed: the service cannot be reached.
    """
    google = GoogleClients(cloud)
    url = google.bucket
    client, _ = connect(url)
    try:
        with google_errors(f"look at the bucket {url}", missing="create it, or mend cloud.bucket"):
            found = client.get_bucket(cloud.bucket, timeout=_CHECK_S)
    except WrongInput as error:
        if http_status_of(error) == FORBIDDEN:
            return None
        raise
    location, within = str(found.location or ""), tuple(found.data_locations or ())
    if serves_region(location, cloud.region, within):
        return None
    where = "+".join(within or (location,)).lower()
    return (
        f"the bucket {url} lies in {where}, and cloud.region is {cloud.region}; take a bucket in"
        f" {cloud.region}, or set cloud.region to where the bucket lies"
    )
