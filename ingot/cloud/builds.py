"""Container images by Cloud Build: the build request, and following the build to its end.

Docker's own builder (BuildKit) with the newest image as cache: kaniko, the other builder there with
a cache, is no longer maintained.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import duration, say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.service import Missing, service_message
from ingot.cloud.clients import GoogleClients, call_api, message_types
from ingot.cloud.images import ImageKind, untagged_name

FOLDER = "ingot/builds"
"""Folder in the bucket for sources, baked parts and logs."""
DOCKER = "gcr.io/cloud-builders/docker"
GCLOUD = "gcr.io/google.com/cloudsdktool/google-cloud-cli:slim"
MACHINE, DISK_GB, MOST_DISK_GB = "E2_HIGHCPU_8", 100, 4000
GOING_ON = ("STATUS_UNKNOWN", "PENDING", "QUEUED", "WORKING")
TIMEOUT_S, QUEUE_S = 7200, 3600
OVER_S = QUEUE_S + TIMEOUT_S + 600.0
"""Seconds after which a build has ended by its own limits, whether the service says so or not."""
POLL_S = 5.0
LOG_LINES = 20
"""Log lines shown when a build failed."""
MODULE = "google.cloud.devtools.cloudbuild_v1"


@dataclass(frozen=True)
class BakedParts:
    """Parts of a run that go into an image, as an archive in the bucket."""

    run: str
    object: str
    bytes: int


@dataclass(frozen=True)
class BuildRequest:
    """Images to build from one source. `tags` are added beside the commit and `latest`; `torch` is
    the build of torch by kind.
    """

    kinds: tuple[ImageKind, ...]
    revision: str
    source: str
    tags: tuple[str, ...] = ()
    torch: dict[ImageKind, str] = field(default_factory=dict)
    baked: dict[ImageKind, BakedParts] = field(default_factory=dict)


@dataclass(frozen=True)
class BuiltImage:
    """An image with its digest in the registry."""

    name: str
    digest: str

    @property
    def pinned(self) -> str:
        """The immutable name of this image."""
        return f"{self.name.rpartition(':')[0]}@{self.digest}"


def build_message(google: GoogleClients, wanted: BuildRequest, *, generation: int = 0) -> Any:
    """The build request. `generation` of the source's object makes sure that exactly what was
    uploaded is built.
    """
    types, cloud = message_types(MODULE), google.cloud
    bucket = google.bucket.removeprefix("gs://")
    steps = [step for kind in wanted.kinds for step in _steps(google, wanted, kind, types)]
    baked = sum(baked.bytes for baked in wanted.baked.values())
    return types.Build(
        source=types.Source(
            storage_source=types.StorageSource(
                bucket=bucket, object_=wanted.source, generation=generation
            )
        ),
        steps=steps,
        images=[name for kind in wanted.kinds for name in image_names(google, wanted, kind)],
        timeout={"seconds": TIMEOUT_S},
        queue_ttl={"seconds": QUEUE_S},
        service_account=(
            f"projects/{google.project}/serviceAccounts/{cloud.service_account}"
            if cloud.service_account
            else ""
        ),
        logs_bucket=f"gs://{bucket}/{FOLDER}/logs",
        options=types.BuildOptions(
            # The archive, its content and the image made of it are on the disk at the same time.
            machine_type=MACHINE,
            disk_size_gb=min(MOST_DISK_GB, DISK_GB + 4 * baked // 10**9),
            logging="LEGACY",
        ),
        tags=["ingot", *wanted.kinds],
    )


def image_names(google: GoogleClients, wanted: BuildRequest, kind: ImageKind) -> list[str]:
    """All names that an image of a kind gets; those with parts of a run come last."""
    return [*_base_names(google, wanted, kind), *_run_names(google, wanted, kind)]


def _base_names(google: GoogleClients, wanted: BuildRequest, kind: ImageKind) -> list[str]:
    return [
        f"{untagged_name(google.cloud, kind)}:{tag}"
        for tag in dict.fromkeys([wanted.revision, "latest", *wanted.tags])
    ]


def _run_names(google: GoogleClients, wanted: BuildRequest, kind: ImageKind) -> list[str]:
    """The names of the image with parts of a run. `latest` is never among them, since all other
    runs would start from it.
    """
    if kind not in wanted.baked:
        return []
    image, run = untagged_name(google.cloud, kind), wanted.baked[kind].run
    return [f"{image}:{wanted.revision}-{run}", f"{image}:run-{run}"]


def _steps(google: GoogleClients, wanted: BuildRequest, kind: ImageKind, types: Any) -> list[Any]:
    """The build steps of an image, with its newest version as cache, followed by those of the image
    with parts of a run. Kinds are built in parallel.
    """
    image, baked = untagged_name(google.cloud, kind), wanted.baked.get(kind)
    arguments = {"COMMIT": wanted.revision, "BUILDKIT_INLINE_CACHE": "1"} | (
        {"TORCH_BUILD": wanted.torch[kind]} if kind in wanted.torch else {}
    )
    steps = [
        types.BuildStep(
            id=kind,
            name=DOCKER,
            env=["DOCKER_BUILDKIT=1"],
            wait_for=["-"],
            args=_docker(
                f"images/{kind}.Dockerfile",
                arguments,
                _base_names(google, wanted, kind),
                ".",
                cache=f"{image}:latest",
            ),
        )
    ]
    if baked is not None:
        folder = f"baked-{kind}"
        fetch = (
            f'mkdir "{folder}" && gcloud storage cat "{google.bucket}/{baked.object}" | tar'
            f' --extract --directory="{folder}"'
        )
        steps += [
            types.BuildStep(
                id=f"fetch-{kind}",
                name=GCLOUD,
                entrypoint="bash",
                args=["-euo", "pipefail", "-c", fetch],
                wait_for=["-"],
            ),
            types.BuildStep(
                id=f"bake-{kind}",
                name=DOCKER,
                env=["DOCKER_BUILDKIT=1"],
                wait_for=[kind, f"fetch-{kind}"],
                args=_docker(
                    "images/bake.Dockerfile",
                    {"BASE": f"{image}:{wanted.revision}", "NAME": baked.run},
                    _run_names(google, wanted, kind),
                    folder,
                ),
            ),
        ]
    return steps


def _docker(
    file: str,
    arguments: dict[str, str],
    called: Sequence[str],
    context: str,
    *,
    cache: str | None = None,
) -> list[str]:
    build_args = [
        part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")
    ]
    tags = [part for name in called for part in ("--tag", name)]
    return [
        "build",
        "--file",
        file,
        *build_args,
        *(["--cache-from", cache] if cache else []),
        *tags,
        context,
    ]


def render_build(google: GoogleClients, wanted: BuildRequest) -> str:
    """The build request as JSON."""
    build = build_message(google, wanted)
    text: str = type(build).to_json(
        build,
        use_integers_for_enums=False,
        always_print_fields_with_no_presence=False,
        sort_keys=True,
    )
    return text + "\n"


def run_build(google: GoogleClients, wanted: BuildRequest) -> list[BuiltImage]:
    """Run the build to its end and return the images with their digests; if this process is stopped
    meanwhile, the build is cancelled.

    Raises:
        WrongInput: it cannot be requested: no permission, no repository, no bucket.
        Failed: a step failed, it timed out, or was cancelled; the end of its log is shown.
    """
    stat = open_bucket(google.bucket).stat(wanted.source)
    if stat is None:
        raise Failed(
            f"the source gs://{google.bucket.removeprefix('gs://')}/{wanted.source} is gone; run"
            " the same command again"
        )
    message = build_message(google, wanted, generation=stat.generation)
    mark = f"ingot-{uuid.uuid4().hex[:16]}"
    message.tags.append(mark)
    name = _submit(google, message, mark)
    try:
        done = _follow(google, name)
    except BaseException:
        _cancel(google, name)
        raise
    if done.status.name != "SUCCESS":
        raise _failure(google, done)
    found = {image.name: image.digest for image in done.results.images}
    called = [name for kind in wanted.kinds for name in image_names(google, wanted, kind)]
    if absent := [name for name in called if name not in found]:
        raise Failed(f"the build ended well without {absent[0]}; see {done.log_url}")
    return [BuiltImage(name, found[name]) for name in called]


def _submit(google: GoogleClients, message: Any, mark: str) -> str:
    """Request the build; returns its name. If the answer is lost, the build is found by its unique
    tag, so that it is not started twice.
    """
    client = google.client("builds")
    kinds = ", ".join(tag for tag in message.tags if not tag.startswith("ingot"))
    denied = (
        f"gcloud projects add-iam-policy-binding {google.project} --member=user:YOU"
        " --role=roles/cloudbuild.builds.editor"
    )
    try:
        # The long-running operation is not needed: the build itself has more information.
        operation = call_api(
            client.create_build,
            f"build the images {kinds}",
            again=False,
            denied=denied,
            parent=google.parent,
            build=message,
        )
        made = operation.metadata.build
    except Failed:
        found = list(
            call_api(
                client.list_builds,
                "find the build",
                request={"parent": google.parent, "filter": f'tags="{mark}"'},
            )
        )
        if not found:
            raise
        made = found[0]
    say(f"build {made.id}: {made.log_url}")
    return f"{google.parent}/builds/{made.id}"


def _follow(google: GoogleClients, name: str) -> Any:
    """Poll the build until it ends, reporting each step as it begins and ends. While the service
    does not answer, the build goes on. Raises Failed if no answer comes until it must be over.
    """
    client, progress = google.client("builds"), _Progress()
    last_error, over = "", time.monotonic() + OVER_S
    while True:
        try:
            now = call_api(client.get_build, "look at the build", request={"name": name})
        except Failed as error:
            if time.monotonic() > over:
                raise
            if (told := service_message(error.__cause__)) != last_error:
                say(f"warning: could not look at the build ({told}); it goes on")
            last_error = told
        else:
            progress.report(now)
            if now.status.name not in GOING_ON:
                return now
        time.sleep(POLL_S)


class _Progress:
    """Reports each state change of a build and its steps once."""

    def __init__(self) -> None:
        self._began, self._states = time.monotonic(), dict[str, str]()

    def report(self, build: Any) -> None:
        for key, state in [
            ("build", build.status.name),
            *((step.id, step.status.name) for step in build.steps),
        ]:
            if state not in ("STATUS_UNKNOWN", self._states.get(key, "STATUS_UNKNOWN")):
                self._states[key] = state
                say(f"{key}: {state.lower()} after {duration(time.monotonic() - self._began)}")


def _failure(google: GoogleClients, build: Any) -> Failed:
    step = next(
        (
            step.id
            for step in build.steps
            if step.status.name in ("FAILURE", "TIMEOUT", "INTERNAL_ERROR")
        ),
        "",
    )
    reason = build.failure_info.detail or build.status_detail or "no reason is given"
    for line in _log(google, build.id):
        say(f"  {line}")
    todo = {
        "TIMEOUT": f"it may take {duration(TIMEOUT_S)}, so build fewer images at once",
        "EXPIRED": "no machine came free, so try again later",
        "CANCELLED": "somebody ended it",
    }.get(build.status.name, "mend what the log says")
    return Failed(
        f"the build ended as {build.status.name.lower()}{f' in step {step}' if step else ''}"
        f" ({reason}); {todo}: {build.log_url}"
    )


def _log(google: GoogleClients, number: str) -> list[str]:
    """The last lines of a build's log; empty if it cannot be read."""
    try:
        data = open_bucket(f"{google.bucket}/{FOLDER}/logs").get(f"log-{number}.txt")
    except (Missing, WrongInput, Failed):
        return []
    return data.decode(errors="replace").splitlines()[-LOG_LINES:]


def _cancel(google: GoogleClients, name: str) -> None:
    """Cancel a build; one that has ended stays as it is."""
    try:
        call_api(google.client("builds").cancel_build, "cancel the build", request={"name": name})
        say("the build is cancelled")
    except IngotError as error:
        say(f"warning: the build may go on ({error})")
