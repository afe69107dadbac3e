"""A bucket and the region that computes: which go together, by one rule, and what is told before
anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.base.errors import WrongInput
from ingot.cloud.regions import region_mismatch, serves_region
from ingot.config.sections.deployment import Cloud
from tests import gcs


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.mark.parametrize(
    ("location", "region", "near"),
    [
        ("US-CENTRAL1", "us-central1", True),
        ("US-CENTRAL1", "us-east1", False),
        ("US", "us-west4", True),
        ("EU", "europe-west4", True),
        ("EU", "europe-west2", False),
        ("US", "europe-west4", False),
        ("ASIA", "asia-east1", True),
        ("US", "northamerica-northeast1", False),
        ("NAM4", "us-central1", True),
        ("NAM4", "us-west1", False),
        ("EUR5", "europe-west2", True),
        ("EUR4", "us-central1", False),
    ],
)
def test_a_multi_region_serves_its_regions(location: str, region: str, near: bool) -> None:
    assert serves_region(location, region) is near


def test_a_pair_that_was_chosen_serves_its_two() -> None:
    assert serves_region("US", "us-east1", ["US-CENTRAL1", "US-EAST1"])
    assert not serves_region("US", "us-west1", ["US-CENTRAL1", "US-EAST1"])


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("EU", "lies in eu, and cloud.region is us-central1"),
        ("EUROPE-WEST4", "take a bucket in us-central1"),
    ],
)
def test_a_bucket_elsewhere_is_told_in_one_line(
    storage: gcs.Server, location: str, told: str
) -> None:
    storage.location = location
    reason = region_mismatch(Cloud(bucket="bucket"))
    assert reason is not None
    assert told in reason
    assert "\n" not in reason


def test_a_bucket_that_is_near_and_one_that_may_not_be_looked_at_stand_in_nobody_s_way(
    storage: gcs.Server,
) -> None:
    assert region_mismatch(Cloud(bucket="bucket")) is None
    storage.location = "EU"
    storage.fault("bucket", times=9, code=403, message="does not have storage.buckets.get access")
    assert region_mismatch(Cloud(bucket="bucket")) is None


def test_a_bucket_that_is_not_there_is_told(storage: gcs.Server) -> None:
    with pytest.raises(
        WrongInput, match=r"look at the bucket gs://other: .*create it, or mend cloud\.bucket"
    ):
        region_mismatch(Cloud(bucket="other"))
