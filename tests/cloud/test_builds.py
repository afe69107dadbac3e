"""Images by Cloud Build, through Google's client against `tests/fakes/builds.py`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.bucket import open_bucket
from ingot.cloud import builds, clients
from ingot.cloud.build_inputs import ingot_source
from ingot.cloud.builds import BakedParts, BuildRequest
from ingot.cloud.clients import GoogleClients
from ingot.config.sections.deployment import Cloud
from tests import gcs, golden
from tests.cloud.checkout import committed, running_from
from tests.fakes import builds as fake
from tests.fakes.google import Server

HERE = "us-central1-docker.pkg.dev/proj/ingot"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake.State]:
    running_from(monkeypatch, committed(tmp_path / "checkout"))
    monkeypatch.setattr(builds, "POLL_S", 0.01)
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(clients, "PATIENCE_S", 2.0)
    server = Server()
    with gcs.serving(monkeypatch) as storage:
        yield fake.install(server, storage)
    server.server_close()


def google_of(service: fake.State, **more: object) -> GoogleClients:
    values = {
        "project": "proj",
        "bucket": "bucket",
        "repository": "ingot",
        "endpoint": service.server.address,
        **more,
    }
    return GoogleClients(Cloud.model_validate(values))


def wish_of(google: GoogleClients, *kinds: str, **more: object) -> BuildRequest:
    made = ingot_source()
    name = f"ingot/builds/source-{made.sha256[:16]}.tgz"
    open_bucket(google.bucket).put(name, made.data)
    return BuildRequest(kinds or ("train",), made.revision, name, **more)  # type: ignore[arg-type]


def test_what_is_asked_for(service: fake.State) -> None:
    google = google_of(service, service_account="builder@proj.iam.gserviceaccount.com")
    wish = BuildRequest(
        ("train", "spark", "serve"),
        "0123456789ab",
        "ingot/builds/source-0123456789abcdef.tgz",
        ("v1",),
        {"train": "cu126", "serve": "cpu"},
        {"train": BakedParts("docs", "ingot/builds/baked-0123456789abcdef.tar", 60 * 10**9)},
    )
    golden.check("build.json", builds.render_build(google, wish))
    assert not service.server.calls


def test_images_are_built_tagged_and_told_with_their_digests(
    service: fake.State, capsys: pytest.CaptureFixture[str]
) -> None:
    google = google_of(service)
    wish = wish_of(google, "train", "serve", tags=("v1",), torch={"train": "cu126", "serve": "cpu"})
    built = builds.run_build(google, wish)
    wanted = [
        f"{HERE}/ingot-{kind}:{tag}"
        for kind in ("train", "serve")
        for tag in (wish.revision, "latest", "v1")
    ]
    assert [image.name for image in built] == wanted
    assert {image.name: image.digest for image in built} == service.pushed
    assert built[0].pinned == f"{HERE}/ingot-train@{service.pushed[wanted[0]]}"
    assert (
        service.source(service.build)["images/train.Dockerfile"]
        == Path("images/train.Dockerfile").read_bytes()
    )
    train = service.build.steps[0]
    assert "DOCKER_BUILDKIT=1" in train.env
    assert ["--cache-from", f"{HERE}/ingot-train:latest"] == list(train.args)[
        (at := list(train.args).index("--cache-from")) : at + 2
    ]
    assert "BUILDKIT_INLINE_CACHE=1" in train.args
    assert f"COMMIT={wish.revision}" in train.args
    told = capsys.readouterr().err
    assert service.build.log_url in told
    assert re.search(r"train: working after .*\ntrain: success|train: success", told)
    assert told.count("serve: success") == 1
    assert service.build.service_account == ""


def test_the_source_is_the_very_object_that_was_sent(service: fake.State) -> None:
    google = google_of(service)
    wish = wish_of(google)
    builds.run_build(google, wish)
    assert (
        service.build.source.storage_source.generation
        == service.storage.objects[wish.source].generation
    )
    with pytest.raises(Failed, match="the source gs://bucket/ingot/builds/none is gone"):
        builds.run_build(google, BuildRequest(("train",), "0", "ingot/builds/none"))


def test_the_image_of_a_run_is_never_the_latest(service: fake.State) -> None:
    google = google_of(service)
    open_bucket("gs://bucket").put("ingot/builds/baked-1.tar", b"tar")
    wish = wish_of(
        google, "train", baked={"train": BakedParts("docs", "ingot/builds/baked-1.tar", 3)}
    )
    built = builds.run_build(google, wish)
    assert [image.name.partition(":")[2] for image in built] == [
        wish.revision,
        "latest",
        f"{wish.revision}-docs",
        "run-docs",
    ]
    steps = {step.id: step for step in service.build.steps}
    assert list(steps["bake-train"].wait_for) == ["train", "fetch-train"]
    assert f"BASE={HERE}/ingot-train:{wish.revision}" in steps["bake-train"].args
    assert f"{HERE}/ingot-train:latest" not in steps["bake-train"].args
    assert steps["bake-train"].args[-1] == "baked-train"


def test_a_build_that_fails_tells_the_step_and_the_end_of_its_log(
    service: fake.State, capsys: pytest.CaptureFixture[str]
) -> None:
    google = google_of(service)
    service.fails, service.log = "train", b"".join(b"line %d\n" % number for number in range(100))
    with pytest.raises(
        Failed,
        match=(
            r"the build ended as failure in step train \(step exited.*\); mend what the log says:"
            r" https://console"
        ),
    ):
        builds.run_build(google, wish_of(google))
    told = capsys.readouterr().err
    assert "  line 99\n" in told
    assert "line 79\n" not in told
    assert service.cancelled == []


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("TIMEOUT", "ended as timeout .*build fewer images at once"),
        ("EXPIRED", "no machine came free"),
        ("CANCELLED", "somebody ended it"),
        ("INTERNAL_ERROR", "ended as internal_error"),
    ],
)
def test_each_other_end_is_told(service: fake.State, status: str, says: str) -> None:
    service.ends = status
    google = google_of(service)
    with pytest.raises(Failed, match=says):
        builds.run_build(google, wish_of(google))
    assert service.pushed == {}


def test_a_build_that_nobody_waits_for_is_cancelled(
    service: fake.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    google = google_of(service)
    service.looks = 10_000
    looked = threading.Event()

    def stopped(_: float) -> None:
        if len(service.server.requests("CloudBuild.GetBuild")) > 2:
            looked.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(builds.time, "sleep", stopped)
    with pytest.raises(KeyboardInterrupt):
        builds.run_build(google, wish_of(google))
    assert looked.is_set()
    assert service.cancelled == [service.build.id]


def test_an_answer_that_got_lost_does_not_build_twice(service: fake.State) -> None:
    google = google_of(service)
    service.server.fault("CloudBuild.CreateBuild", 503, lose=True)
    assert len(builds.run_build(google, wish_of(google))) == 2
    assert len(service.builds) == 1


def test_a_service_that_is_away_is_told_and_nothing_is_left(service: fake.State) -> None:
    google = google_of(service)
    service.server.fault("CloudBuild.CreateBuild", 503)
    with pytest.raises(
        Failed, match=r"could not build the images train: on purpose; run the same command again"
    ):
        builds.run_build(google, wish_of(google))
    assert service.builds == {}


def test_a_short_silence_while_it_is_followed_does_no_harm(service: fake.State) -> None:
    google = google_of(service)
    service.server.fault("CloudBuild.GetBuild", 503, times=3)
    assert builds.run_build(google, wish_of(google))


@pytest.mark.parametrize("code", [500, 503])
def test_a_service_that_is_away_while_a_build_is_followed_ends_no_build(
    service: fake.State,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
) -> None:
    """An image of CUDA takes half an hour; the same command would build it anew."""
    google = google_of(service)

    def silence(_: float) -> None:
        """Begins after the first look."""
        monkeypatch.setattr(builds.time, "sleep", lambda _: None)
        monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
        service.server.fault("CloudBuild.GetBuild", code, times=3)

    monkeypatch.setattr(builds.time, "sleep", silence)
    assert builds.run_build(google, wish_of(google))
    assert service.cancelled == []
    warning = "warning: could not look at the build (on purpose); it goes on\n"
    assert capsys.readouterr().err.count(warning) == 1


def test_a_service_that_stays_away_is_not_waited_for_when_the_build_must_be_over(
    service: fake.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    google = google_of(service)
    monkeypatch.setattr(builds, "OVER_S", 0.0)
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    service.server.fault("CloudBuild.GetBuild", 503)
    with pytest.raises(Failed, match="could not look at the build: on purpose"):
        builds.run_build(google, wish_of(google))


def test_an_error_within_the_service_is_asked_again(service: fake.State) -> None:
    google = google_of(service)
    service.server.fault("CloudBuild.ListBuilds", 500)
    service.server.fault("CloudBuild.CreateBuild", 500, lose=True)
    assert builds.run_build(google, wish_of(google))
    assert len(service.builds) == 1


@pytest.mark.parametrize(
    ("code", "message", "says"),
    [
        (
            403,
            "Permission denied",
            (
                r"Permission denied; gcloud projects add-iam-policy-binding proj"
                r" .*roles/cloudbuild.builds.editor"
            ),
        ),
        (429, "Quota exceeded", "a quota is used up"),
        (400, "invalid", "mend the recipe"),
    ],
)
def test_what_the_service_refuses_is_one_line(
    service: fake.State, code: int, message: str, says: str
) -> None:
    google = google_of(service)
    service.server.fault("CloudBuild.CreateBuild", code, message=message)
    with pytest.raises((WrongInput, Failed), match=says):
        builds.run_build(google, wish_of(google))
    assert service.builds == {}


def test_the_disk_has_room_for_what_is_baked_in(service: fake.State) -> None:
    google = google_of(service)
    small = builds.build_message(google, BuildRequest(("train",), "0", "s"))
    large = builds.build_message(
        google,
        BuildRequest(("train",), "0", "s", baked={"train": BakedParts("docs", "b", 200 * 10**9)}),
    )
    assert (small.options.disk_size_gb, large.options.disk_size_gb) == (100, 900)
    huge = builds.build_message(
        google, BuildRequest(("train",), "0", "s", baked={"train": BakedParts("docs", "b", 10**13)})
    )
    assert huge.options.disk_size_gb == 4000
