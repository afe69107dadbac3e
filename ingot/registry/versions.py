"""Registered versions, and the interface that both registries implement: a file and folders on this
disk, or the Model Registry of Vertex AI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ingot.base.errors import Failed, WrongInput
from ingot.base.listing import find_files
from ingot.base.reports import EvaluationReport
from ingot.base.storage import is_file, stamp


@dataclass(frozen=True)
class LiveChange:
    """One change of the live pointer."""

    version: int
    time: float
    reason: str


@dataclass(frozen=True)
class LocalVersion:
    """One version in the local registry. `folder` is the registry's copy of the model folder."""

    name: str
    number: int
    model_hash: str
    tokenizer_hash: str
    folder: Path
    report: EvaluationReport
    lineage: dict[str, Any]
    created: float

    @property
    def where(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class VertexVersion:
    """One model in one serving container; the same files in another container are another version.

    `where` is the folder in the bucket, `resource` the service's name of the version, `classifies`
    whether it is a classifier, `container` a fingerprint of its container, `refused` whether the
    gate decided against it.
    """

    name: str
    number: int
    model_hash: str
    tokenizer_hash: str
    report: EvaluationReport
    lineage: dict[str, Any]
    created: float
    where: str
    resource: str
    classifies: bool
    engine: str
    container: str
    refused: bool


class RegisteredVersion(Protocol):
    """One registered model of any registry: `where` is a folder or a bucket URL."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def model_hash(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def report(self) -> EvaluationReport: ...
    @property
    def lineage(self) -> dict[str, Any]: ...
    @property
    def created(self) -> float: ...
    @property
    def where(self) -> str: ...


AnyVersion = TypeVar("AnyVersion", bound=RegisteredVersion)


class ModelRegistry(Protocol[AnyVersion]):
    """Versions of models by name, their reports, and which one is live. Implementations behave and
    raise as `LocalRegistry` does.
    """

    @property
    def place(self) -> str:
        """Where the registry is, for messages."""

    @property
    def knob(self) -> str:
        """What a command line that names no recipe needs to find it, after a space."""

    def names(self) -> list[str]: ...
    def versions(self, name: str) -> list[AnyVersion]: ...
    def version(self, name: str, number: int) -> AnyVersion: ...
    def live(self, name: str) -> AnyVersion | None: ...
    def find(self, name: str, report: EvaluationReport) -> AnyVersion | None: ...
    def history(self, name: str) -> Sequence[LiveChange]: ...
    def add(
        self,
        name: str,
        folder: Path,
        report: EvaluationReport,
        lineage: Mapping[str, Any],
        copied: Callable[[], None] = ...,
    ) -> AnyVersion: ...
    def point(
        self, name: str, number: int, reason: str, *, instead_of: int | None = -1
    ) -> None: ...
    def previous(self, name: str) -> AnyVersion: ...
    def rollback(self, name: str, reason: str) -> AnyVersion: ...
    def check(self, version: AnyVersion, *, checksums: bool = False) -> None: ...
    def fetch(self, version: AnyVersion) -> Path:
        """The version's files as a local folder, downloaded if necessary."""


def newest_version(registry: ModelRegistry[Any], name: str) -> Any:
    """The newest version of a name. Raises WrongInput where there is none."""
    known = registry.versions(name)
    return known[-1] if known else registry.version(name, 1)  # raises WrongInput: there is none


def unknown_version(
    registry: ModelRegistry[Any], name: str, number: int, known: Sequence[int]
) -> WrongInput:
    """The error where `name` has no version `number`, only those `known`."""
    if not known:
        return WrongInput(
            f"nothing is registered as {name} in {registry.place}; it knows"
            f" {', '.join(registry.names()) or 'no name'}; run `ingot register` first"
        )
    return WrongInput(
        f"{name} has no version {number} in {registry.place}; it has {', '.join(map(str, known))}"
    )


def another_live(name: str) -> Failed:
    """The error where another version went live while one was rolled back."""
    return Failed(f"another version of {name} went live meanwhile; run the same command again")


def no_earlier(registry: ModelRegistry[Any], name: str, now: int | None) -> WrongInput:
    """The error where no earlier version can be made live: none was before `now`, or none is."""
    known = [version.number for version in registry.versions(name)]
    if not known:
        return unknown_version(registry, name, 1, known)
    if now is None:
        return WrongInput(
            f"nothing is live as {name} in {registry.place}; `ingot deploy {name} --version"
            f" {max(known)}{registry.knob}` makes the newest version live"
        )
    others = [number for number in known if number != now]
    return WrongInput(
        f"nothing was live before {name} v{now}; "
        + (
            f"`ingot deploy {name} --version {max(others)}{registry.knob}` takes another one"
            if others
            else "it has no other version"
        )
    )


def unchanged_since_now(folder: Path) -> Callable[[], None]:
    """What raises Failed once files of `folder` have changed: another run may export a model into
    it after it was checked, and a copy would hold that one or parts of both.
    """

    changed = Failed(
        f"{folder} was changed while it was registered, and another model than the one that was"
        " measured may have been copied; run `ingot register` again"
    )

    def stamps() -> list[dict[str, Any]]:
        try:
            return [stamp(file) for file in find_files(str(folder)) if is_file(file)]
        except FileNotFoundError:  # between two questions, as another run replaced the folder
            raise changed from None

    def check() -> None:
        if stamps() != before:
            raise changed

    before = stamps()
    return check


def stale_decision(name: str, live: int | None, compared: int | None) -> WrongInput:
    """The error where version `live` went live after the gate compared a model with `compared`
    (None: no version).
    """
    now, then = (f"{name} v{version}" if version else "nothing" for version in (live, compared))
    return WrongInput(
        f"{now} went live since the gate compared the new model with {then}; run `ingot gate` again"
    )
