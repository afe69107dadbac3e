"""Versions in the Model Registry of Vertex AI: one model of a registered name, its files and exact
numbers in the bucket.

Under `gs://BUCKET/ingot/models/NAME/`: a folder for each model with its files and a marker written
last, a record beside it (the whole report and lineage; the service's labels are too narrow for
them), and `live.json`. A version that died half-way is gone on with by the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.base.remote.bucket import Bucket, open_bucket
from ingot.base.remote.lease import lease
from ingot.base.remote.service import Missing
from ingot.base.reports import EvaluationReport, parse_report
from ingot.base.storage import atomic_folder
from ingot.cloud.clients import GoogleClients
from ingot.cloud.regions import region_mismatch
from ingot.cloud.vertex import models
from ingot.cloud.vertex.jobs import http_status_of
from ingot.cloud.vertex.models import ModelVersion
from ingot.config.recipe import Recipe
from ingot.registry.versions import Turn, VertexVersion
from ingot.registry.vertexai import objects as pointer
from ingot.registry.vertexai.objects import SCHEMA, classifies, damaged, marked, put_files
from ingot.registry.vertexai.resources import (
    CONTAINER,
    ENGINE,
    KEY,
    Wanted,
    key_of,
    label,
    labels_of,
    resource_id,
    wanted_by,
)

BESIDE = "-repository/"
"""Ends the name of the folder of a model repository beside the model and for the container that it
is of, for engines that want one.
"""
LIVE = "live"
"""The alias of the live version, for whoever asks the service rather than ingot."""


class VertexRegistry:
    """The registry in `cloud.project`, `cloud.region` and `cloud.bucket`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._google = recipe, GoogleClients(recipe.cloud)

    @property
    def place(self) -> str:
        return f"the Model Registry of {self._google.parent}"

    def names(self) -> list[str]:
        found = models.models(self._google)
        return sorted(
            model.display_name
            for model in found
            if model.model.endswith(f"/{resource_id(model.display_name)}")
        )

    def versions(self, name: str) -> list[VertexVersion]:
        """All versions of `name`, oldest first."""
        return [self._version(name, found) for found in self._listed(name)]

    def version(self, name: str, number: int) -> VertexVersion:
        """Raises WrongInput naming the versions that there are."""
        known = self._listed(name)
        if not known:
            raise WrongInput(
                f"nothing is registered as {name} in {self.place}; it knows"
                f" {', '.join(self.names()) or 'no name'}; run `ingot register` first"
            )
        found = next((version for version in known if version.number == number), None)
        if found is None:
            raise WrongInput(
                f"{name} has no version {number} in {self.place}; it has"
                f" {', '.join(str(version.number) for version in known)}"
            )
        return self._version(name, found)

    def live(self, name: str) -> VertexVersion | None:
        """The version that is live under `name`. Its alias is put right where it is not, as after a
        writer that died.
        """
        now, known = pointer.read(self._bucket(name)).now, self._listed(name)
        self._follow(known, now)
        return None if now is None else self.version(name, now)

    def find(self, name: str, report: EvaluationReport) -> VertexVersion | None:
        """The version with the model that `report` is about: in the recipe's container, else the
        newest.

        None too where its record is missing or damaged, which registering it again mends.
        """
        key = key_of(report.model_hash, report.tokenizer_hash)
        known = [version for version in self._listed(name) if version.labels[KEY] == key]
        if not known or self._record(name, key) is None:
            return None
        wanted = self._wanted(name, key).mark
        return self._version(
            name,
            next(
                (version for version in known if version.labels.get(CONTAINER) == wanted), known[-1]
            ),
        )

    def is_served_so(self, version: VertexVersion) -> bool:
        """Has the version the container that the recipe asks for?"""
        return (
            version.container
            == self._wanted(version.name, key_of(version.model_hash, version.tokenizer_hash)).mark
        )

    def history(self, name: str) -> Sequence[Turn]:
        """All moves of the live pointer, oldest first."""
        return pointer.read(self._bucket(name)).history

    def previous(self, name: str) -> VertexVersion:
        """The version that was live before. Raises WrongInput when there is none."""
        found = pointer.read(self._bucket(name))
        if found.now is None:
            raise WrongInput(
                f"nothing is live as {name} in {self.place}; `ingot deploy {name}` makes the newest"
                " version live"
            )
        if found.previous is None:
            raise WrongInput(
                f"nothing was live before {name} v{found.now}; `ingot deploy {name} --version V`"
                " takes another one"
            )
        return self.version(name, found.previous)

    def add(
        self, name: str, folder: Path, report: EvaluationReport, lineage: Mapping[str, Any]
    ) -> VertexVersion:
        """Upload the model in `folder` and register it with its report. A version that there is
        already takes the new report, and is mended.

        Raises:
            WrongInput: bucket or image are missing or lie elsewhere, a right is missing, or
                somebody else's model has the id.
            Failed: another process registers the very same model.
        """
        self._check_region()
        key, bucket = key_of(report.model_hash, report.tokenizer_hash), self._bucket(name)
        wanted = self._wanted(name, key)
        with lease(bucket, f"ingot register {name}", name=f"locks/{key}", wait=True):
            put_files(folder, open_bucket(bucket.url_of(key)))
            for path, text in wanted.files.items():
                bucket.put(f"{key}-{wanted.mark}{BESIDE}{path}", text.encode())
            self._write_record(name, key, folder, report, lineage)
            found = self._found(name, key, wanted.mark)
            if found is None:
                self._upload(name, key, report, wanted)
                found = self._found(name, key, wanted.mark)
            else:
                self._relabel(found, report)
        if found is None:
            raise Failed(
                f"{name} was registered and is not there; see {self.place}, and run the same"
                " command again"
            )
        return self._version(name, found)

    def point(self, name: str, number: int, reason: str, *, instead_of: int | None = -1) -> None:
        """Make version `number` live; see `store.Registry.point`. Raises Failed when another
        process moved the pointer at the same time.
        """
        known = self._listed(name)
        self.version(name, number)
        found = pointer.read(self._bucket(name))
        if found.now != number:
            pointer.check(name, found.now, instead_of)
            pointer.move(self._bucket(name), found, number, reason)
        self._follow(known, number)

    def rollback(self, name: str, reason: str, *, to: int | None = None) -> VertexVersion:
        """Make the version live that was live before this one; again goes one further back. `to`:
        only if it is this one.

        Raises as `previous` and `point` do.
        """
        version = self.previous(name)
        if to not in (None, version.number):
            raise Failed(
                f"another version of {name} went live meanwhile; run the same command again"
            )
        pointer.move(
            self._bucket(name), pointer.read(self._bucket(name)), version.number, reason, back=True
        )
        self._follow(self._listed(name), version.number)
        return version

    def check(self, version: VertexVersion, *, checksums: bool = False) -> None:
        """Raises WrongInput when objects of a version are missing or changed, by the checksums that
        the service keeps: no byte is read.
        """
        if wrong := damaged(open_bucket(version.where)):
            raise WrongInput(
                f"{version.name} v{version.number} is damaged: {wrong[0]} is missing or changed;"
                " register it again, or deploy another version"
            )

    def fetch(self, version: VertexVersion) -> Path:
        """The version's files in a folder of this disk, downloaded where they are not there yet."""
        bucket, files = open_bucket(version.where), marked(open_bucket(version.where))
        folder = (
            Path(self._recipe.output)
            / "registry-vertex"
            / version.name
            / key_of(version.model_hash, version.tokenizer_hash)
        )
        if not all(
            (folder / file["path"]).is_file()
            and (folder / file["path"]).stat().st_size == file["bytes"]
            for file in files
        ):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(folder) as partial:
                for file in files:
                    (partial / file["path"]).parent.mkdir(parents=True, exist_ok=True)
                    bucket.get_to_file(file["path"], partial / file["path"])
        return folder

    def _bucket(self, name: str) -> Bucket:
        """What lies under the name; objects of several names share no connection."""
        return self._buckets.setdefault(
            name, open_bucket(f"{self._google.bucket}/ingot/models/{name}")
        )

    @cached_property
    def _buckets(self) -> dict[str, Bucket]:
        return {}

    def _listed(self, name: str) -> list[ModelVersion]:
        """The versions that ingot registered, oldest first; of one that another upload doubled, the
        first.
        """
        found: dict[tuple[str, str | None], ModelVersion] = {}
        for version in models.versions(self._google, resource_id(name)):
            if KEY in version.labels:
                found.setdefault((version.labels[KEY], version.labels.get(CONTAINER)), version)
        return list(found.values())

    def _found(self, name: str, key: str, mark: str) -> ModelVersion | None:
        return next(
            (
                version
                for version in self._listed(name)
                if (version.labels[KEY], version.labels.get(CONTAINER)) == (key, mark)
            ),
            None,
        )

    def _wanted(self, name: str, key: str) -> Wanted:
        return wanted_by(self._recipe, self._bucket(name).url_of(key))

    def _version(self, name: str, found: ModelVersion) -> VertexVersion:
        bucket, value = self._bucket(name), self._record(name, found.labels[KEY])
        record = bucket.url_of(f"{found.labels[KEY]}.json")
        if value is None:
            raise WrongInput(
                f"{record}, the record of {name} v{found.number}, is missing or damaged; register"
                " the model again"
            )
        if value["schema"] > SCHEMA:
            raise WrongInput(
                f"{record} has schema {value['schema']}, newer than this ingot's {SCHEMA}; upgrade"
                " ingot"
            )
        report = parse_report(json.dumps(value["report"]), record)
        return VertexVersion(
            name,
            found.number,
            report.model_hash,
            report.tokenizer_hash,
            report,
            value["lineage"],
            found.created,
            bucket.url_of(found.labels[KEY]),
            f"{found.model}@{found.number}",
            value["classifies"],
            found.labels.get(ENGINE, self._recipe.serve.engine),
            found.labels.get(CONTAINER, ""),
        )

    def _record(self, name: str, key: str) -> dict[str, Any] | None:
        """The exact numbers of a model; None where they are missing or damaged."""
        try:
            value: dict[str, Any] = json.loads(self._bucket(name).get(f"{key}.json"))
        except (Missing, ValueError):
            return None
        return value

    def _write_record(
        self,
        name: str,
        key: str,
        folder: Path,
        report: EvaluationReport,
        lineage: Mapping[str, Any],
    ) -> None:
        """Of a model that is there already only the report is new."""
        value = self._record(name, key) or {
            "schema": SCHEMA,
            "lineage": dict(lineage),
            "classifies": classifies(folder),
        }
        text = json.dumps(
            {**value, "report": asdict(report)}, indent=1, ensure_ascii=False, allow_nan=False
        )
        self._bucket(name).put(f"{key}.json", text.encode())

    def _upload(self, name: str, key: str, report: EvaluationReport, wanted: Wanted) -> None:
        """Make the version, after whatever a process that died began has ended."""
        model_id = resource_id(name)
        for operation in models.being_uploaded(self._google, model_id):
            models.await_upload(self._google, operation)
        if self._found(name, key, wanted.mark) is not None:
            return
        artifacts = self._bucket(name).url_of(
            f"{key}-{wanted.mark}{BESIDE}".rstrip("/") if wanted.files else key
        )
        for first in (not models.versions(self._google, model_id), False):
            request = models.upload_request(
                self._google,
                model_id,
                first=first,
                display_name=name,
                artifacts=artifacts,
                container=wanted.container,
                labels=self._labels(report, key, wanted.mark),
                description=_description(report),
            )
            try:
                models.upload(self._google, request)
                return
            except WrongInput as error:
                if (
                    not first or http_status_of(error) != 409
                ):  # another process made the first version of this name meanwhile
                    raise

    def _labels(self, report: EvaluationReport, key: str, mark: str) -> dict[str, str]:
        ours = {
            KEY: key,
            CONTAINER: mark,
            ENGINE: self._recipe.serve.engine,
            "ingot-run": label(self._recipe.name),
            "ingot-verb": "register",
        }
        return labels_of(report, ours, self._recipe.cloud.labels)

    def _relabel(self, found: ModelVersion, report: EvaluationReport) -> None:
        wanted = {
            **self._labels(report, found.labels[KEY], found.labels[CONTAINER]),
            "ingot-run": found.labels.get("ingot-run", ""),
        }
        if wanted != found.labels:
            models.update_labels(self._google, found, wanted)

    def _follow(self, known: Sequence[ModelVersion], now: int | None) -> None:
        """The alias `live` on the version that the pointer means, and on no other."""
        try:
            for version in known:
                if LIVE in version.aliases and version.number != now:
                    models.change_aliases(self._google, version, remove=[LIVE])
            for version in known:
                if LIVE not in version.aliases and version.number == now:
                    models.change_aliases(self._google, version, add=[LIVE])
        except (Failed, WrongInput) as error:
            say(
                f"warning: the alias {LIVE} is not where it should be ({error}); the next command"
                " tries again"
            )

    def _check_region(self) -> None:
        if reason := region_mismatch(self._recipe.cloud):
            raise WrongInput(reason)


def _description(report: EvaluationReport) -> str:
    """One line for the console."""
    metrics = ", ".join(
        f"{key} {metric.value:.6g}" for key, metric in sorted(report.metrics.items())[:5]
    )
    return f"model {report.model_hash}, tokenizer {report.tokenizer_hash}; {metrics}"
