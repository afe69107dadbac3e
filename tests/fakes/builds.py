"""Cloud Build: `install(server)` answers on a `tests.fakes.google.Server`. Builds queue, work step
by step and end, over looks and time.

What a build asks for is checked as far as Google documents it: the source must lie in the bucket in
the generation that is named, each Dockerfile in its archive, what is pushed must be tagged by a
step, and a service account of one's own needs a place for the logs.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests import gcs
from tests.fakes.google import Refused, Server
from tests.lazy import lazy

types = lazy("google.cloud.devtools.cloudbuild_v1")

NAME = re.compile(
    r"(?P<host>[a-z0-9-]+-docker\.pkg\.dev)/(?P<project>[^/]+)/(?P<repository>[a-z][a-z0-9-]*)/(?P<image>[a-z0-9-]+):(?P<tag>[A-Za-z0-9_][\w.-]{0,127})"
)


@dataclass
class State:
    """`fails` is the id of the step at which the next builds fail; `ends` another end than success.
    `looks`: how many a step takes.
    """

    server: Server
    storage: gcs.Server
    project: str = "proj"
    region: str = "us-central1"
    repository: str = "ingot"
    looks: int = 1
    fails: str | None = None
    ends: str = "SUCCESS"
    log: bytes = b""
    builds: dict[str, types.Build] = field(default_factory=dict)
    pushed: dict[str, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    _looked: dict[str, int] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def build(self) -> types.Build:
        """The only one."""
        (found,) = self.builds.values()
        return found

    def source(self, build: types.Build) -> dict[str, bytes]:
        """Files of a build's source by name, read from the bucket."""
        where = build.source.storage_source
        with tarfile.open(
            fileobj=io.BytesIO(self.storage.objects[where.object_].data), mode="r:gz"
        ) as tar:
            return {item.name: tar.extractfile(item).read() for item in tar if item.isfile()}  # type: ignore[union-attr]

    def create(self, request: Any) -> Any:
        if request.parent != self.parent:
            raise Refused(403, f"The caller does not have permission on {request.parent}")
        build = types.Build(request.build)
        self._check(build)
        build.id = f"{self.server.number():08d}-aaaa"
        build.name, build.project_id = f"{self.parent}/builds/{build.id}", self.project
        build.status, build.create_time = "QUEUED", datetime.now(UTC)
        build.log_url = f"https://console.cloud.google.com/cloud-build/builds;region={self.region}/{build.id}?project=1"
        self.builds[build.id] = build
        return self.server.operation(
            self.parent,
            lambda: self.builds[build.id],
            metadata=types.BuildOperationMetadata(build=build),
            polls=99,
        )

    def get(self, request: Any) -> types.Build:
        build = self._found(request)
        if build.status.name in ("QUEUED", "WORKING"):
            self._looked[build.id] = self._looked.get(build.id, 0) + 1
            self._advance(build, self._looked[build.id])
        return build

    def list(self, request: Any) -> types.ListBuildsResponse:
        mark = re.fullmatch(r'tags="([^"]+)"', request.filter)
        if mark is None:
            raise Refused(400, f"invalid filter {request.filter!r}")
        return types.ListBuildsResponse(
            builds=[build for build in self.builds.values() if mark[1] in build.tags]
        )

    def cancel(self, request: Any) -> types.Build:
        build = self._found(request)
        if build.status.name not in ("QUEUED", "WORKING"):
            raise Refused(400, "build is already finished")
        build.status = "CANCELLED"
        self.cancelled.append(build.id)
        return build

    def _found(self, request: Any) -> types.Build:
        number = request.name.rpartition("/")[2]
        if request.name != f"{self.parent}/builds/{number}" or number not in self.builds:
            raise Refused(404, f"Requested entity {request.name} was not found.")
        return self.builds[number]

    def _advance(self, build: types.Build, looked: int) -> None:
        """A look in the queue, then as many for each step; a step begins when those that it waits
        for have ended.
        """
        done = {"-", *(step.id for step in build.steps if step.status.name == "SUCCESS")}
        build.status = "QUEUED" if looked == 1 else "WORKING"
        if looked == 1:
            return
        for step in build.steps:
            waited = set(step.wait_for) or {
                other.id for other in build.steps[: list(build.steps).index(step)]
            }
            if step.status.name == "WORKING" and looked % (self.looks + 1) == 0:
                step.status = "FAILURE" if step.id == self.fails else "SUCCESS"
            elif step.status.name == "STATUS_UNKNOWN" and waited <= done:
                step.status = "WORKING"
        if any(step.status.name == "FAILURE" for step in build.steps):
            self._end(build, "FAILURE")
            build.failure_info = {
                "type_": "USER_BUILD_STEP",
                "detail": "step exited with non-zero status: 1",
            }
        elif all(step.status.name == "SUCCESS" for step in build.steps):
            self._end(build, self.ends)

    def _end(self, build: types.Build, status: str) -> None:
        build.status = status
        place = build.logs_bucket.removeprefix("gs://").partition("/")[2]
        self.storage.write(f"{place}/log-{build.id}.txt", self.log, {}, {})
        if status == "SUCCESS":
            self.pushed |= {
                name: "sha256:" + hashlib.sha256(name.encode()).hexdigest() for name in build.images
            }
            build.results = {
                "images": [{"name": name, "digest": self.pushed[name]} for name in build.images]
            }

    def _check(self, build: types.Build) -> None:
        where = build.source.storage_source
        found = self.storage.objects.get(where.object_)
        if (
            where.bucket != self.storage.bucket
            or found is None
            or (where.generation and found.generation != where.generation)
        ):
            raise Refused(
                400,
                f"could not resolve source: gs://{where.bucket}/{where.object_}#{where.generation}"
                " does not exist",
            )
        if not build.steps or not 0 < build.timeout.total_seconds() <= 86_400:
            raise Refused(400, "a build needs steps, and a timeout of at most 24 hours")
        if build.service_account and not re.fullmatch(
            rf"projects/{self.project}/serviceAccounts/[^/@]+@[^/@]+", build.service_account
        ):
            raise Refused(400, f"invalid service account {build.service_account}")
        if (
            build.service_account
            and not build.logs_bucket
            and build.options.logging.name not in ("CLOUD_LOGGING_ONLY", "NONE")
        ):
            raise Refused(
                400,
                "if 'build.service_account' is specified, the build must specify"
                " 'build.logs_bucket'",
            )
        if not 0 <= build.options.disk_size_gb <= 4000:
            raise Refused(400, "disk_size_gb must be at most 4000")
        self._check_steps(build)

    def _check_steps(self, build: types.Build) -> None:
        files, ids, tagged = self.source(build), [step.id for step in build.steps], set()
        if len(set(ids)) < len(ids):
            raise Refused(400, "two steps have the same id")
        for number, step in enumerate(build.steps):
            if not set(step.wait_for) <= {"-", *ids[:number]}:
                raise Refused(400, f"step {step.id} waits for a step that is not before it")
            if step.name.endswith("/docker"):
                args = list(step.args)
                file = args[args.index("--file") + 1]
                if file not in files:
                    raise Refused(400, f"step {step.id}: {file} is not in the source")
                declared = set(re.findall(r"^ARG (\w+)", files[file].decode(), re.MULTILINE)) | {
                    "BUILDKIT_INLINE_CACHE"
                }
                given = {
                    args[at + 1].partition("=")[0]
                    for at, one in enumerate(args)
                    if one == "--build-arg"
                }
                if not given <= declared:
                    raise Refused(
                        400, f"step {step.id}: {file} declares no ARG {sorted(given - declared)}"
                    )
                tagged |= {args[at + 1] for at, one in enumerate(args) if one == "--tag"}
            if step.name.endswith("google-cloud-cli:slim"):
                sources = re.findall(r'gs://([^/"]+)/([^"]+)', " ".join(step.args))
                if not sources or any(
                    bucket != self.storage.bucket or name not in self.storage.objects
                    for bucket, name in sources
                ):
                    raise Refused(400, f"step {step.id} copies what is not there")
        for image in build.images:
            name = NAME.fullmatch(image)
            if name is None or image not in tagged:
                raise Refused(400, f"{image} is no image that a step makes")
            if (name["host"], name["project"], name["repository"]) != (
                f"{self.region}-docker.pkg.dev",
                self.project,
                self.repository,
            ):
                raise Refused(400, f"{image}: the repository does not exist")


def install(server: Server, storage: gcs.Server) -> State:
    state = State(server, storage)
    server.on("CloudBuild.CreateBuild", state.create)
    server.on("CloudBuild.GetBuild", state.get)
    server.on("CloudBuild.ListBuilds", state.list)
    server.on("CloudBuild.CancelBuild", state.cancel)
    return state
