"""Names of images."""

from __future__ import annotations

import pytest

from ingot.base.errors import WrongInput
from ingot.cloud.images import image_of
from ingot.config.sections.deployment import Cloud, Images


def test_an_image_lies_in_the_repository_of_the_region() -> None:
    cloud = Cloud(project="proj", region="europe-west4", repository="ingot")
    assert image_of(cloud, "train") == "europe-west4-docker.pkg.dev/proj/ingot/ingot-train:latest"
    assert (
        image_of(Cloud(project="example.com:proj", repository="ingot"), "spark")
        == "us-central1-docker.pkg.dev/example.com/proj/ingot/ingot-spark:latest"
    )


def test_an_image_that_is_given_wins() -> None:
    cloud = Cloud(project="proj", repository="ingot", images=Images(serve="docker.io/mine/serve:1"))
    assert image_of(cloud, "serve") == "docker.io/mine/serve:1"
    assert image_of(cloud, "train").endswith("/ingot-train:latest")


@pytest.mark.parametrize(
    ("cloud", "says"),
    [
        (
            Cloud(project="proj"),
            r"no container image for train; set cloud.images.train, or cloud.repository",
        ),
        (
            Cloud(project="proj", repository="us-docker.pkg.dev/proj/ingot"),
            r"'us-docker.pkg.dev/proj/ingot' is no name of a repository",
        ),
        (
            Cloud(repository="ingot", endpoint="http://127.0.0.1:1"),
            r"no Google Cloud project is known; set cloud.project",
        ),
    ],
)
def test_what_is_missing_is_named(cloud: Cloud, says: str) -> None:
    with pytest.raises(WrongInput, match=says):
        image_of(cloud, "train")
