"""The registry in Vertex AI: versions in its Model Registry, their files and reports in the bucket.

Under `gs://BUCKET/ingot/models/NAME/` lie a folder for each model with its files and a marker
written last, a record beside it (report, lineage and the gate's decision in full, for which the
service's labels are too short), and the live pointer `live.json`. A registration that was killed is
completed by the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.base.remote.bucket import Bucket, open_bucket
from ingot.base.remote.lease import lease
from ingot.base.remote.service import Missing
from ingot.base.reports import EvaluationReport, parse_report
from ingot.base.storage import atomic_folder
from ingot.cloud.clients import EXISTS, GoogleClients, http_status_of
from ingot.cloud.instances import label
from ingot.cloud.regions import region_mismatch
from ingot.cloud.vertex import models
from ingot.cloud.vertex.models import ModelVersion
from ingot.config.recipe import Recipe
from ingot.registry.versions import (
    LiveChange,
    VertexVersion,
    another_live,
    no_earlier,
    unknown_version,
)
from ingot.registry.vertexai import objects
from ingot.registry.vertexai.objects import (
    SCHEMA,
    damaged_files,
    fetch_files,
    is_classifier,
    listed_files,
    upload_files,
)
from ingot.registry.vertexai.resources import (
    CONTAINER,
    ENGINE,
    KEY,
    ServingSpec,
    kept_image,
    model_key,
    resource_id,
    serving_spec,
    version_description,
    version_labels,
)

REPOSITORY_SUFFIX = "-repository/"
"""Suffix of the folder of a model repository beside the model, for engines that need one."""
LIVE = "live"
"""The alias of the live version, for users of the service's own tools."""


class VertexRegistry:
    """The registry in `cloud.project`, `cloud.region` and `cloud.bucket`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._google = recipe, GoogleClients(recipe.cloud)
        self._buckets: dict[str, Bucket] = {}

    @property
    def place(self) -> str:
        return f"the Model Registry of {self._google.parent}"

    @property
    def knob(self) -> str:
        return " registry.kind=vertex"

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
        """One version. Raises WrongInput, naming the existing versions, where it is unknown."""
        known = self._listed(name)
        found = next((version for version in known if version.number == number), None)
        if found is None:
            raise unknown_version(self, name, number, [version.number for version in known])
        return self._version(name, found)

    def live(self, name: str) -> VertexVersion | None:
        """The live version of `name`. Its alias is corrected if a killed process left it wrong."""
        now, known = objects.read_pointer(self._bucket(name)).now, self._listed(name)
        self._update_alias(known, now)
        return None if now is None else self.version(name, now)

    def find(self, name: str, report: EvaluationReport) -> VertexVersion | None:
        """The version of the model that `report` measured: in the recipe's container, else the
        newest.

        None also where its record is missing or damaged, so that it is registered again.
        """
        key = model_key(report.model_hash, report.tokenizer_hash)
        known = [version for version in self._listed(name) if version.labels[KEY] == key]
        if not known or self._record(name, key) is None:
            return None
        mark = self._spec(name, key).mark
        return self._version(
            name,
            next(
                (version for version in known if version.labels.get(CONTAINER) == mark), known[-1]
            ),
        )

    def has_container(self, version: VertexVersion) -> bool:
        """Whether the version has the container that the recipe asks for."""
        return (
            version.container
            == self._spec(version.name, model_key(version.model_hash, version.tokenizer_hash)).mark
        )

    def history(self, name: str) -> Sequence[LiveChange]:
        """All changes of the live pointer, oldest first."""
        return objects.read_pointer(self._bucket(name)).history

    def previous(self, name: str) -> VertexVersion:
        """The previously live version. Raises WrongInput where there is none."""
        found = objects.read_pointer(self._bucket(name))
        if found.now is None:
            raise no_earlier(self, name, None)
        if found.previous is None:
            raise no_earlier(self, name, found.now)
        return self.version(name, found.previous)

    def add(
        self,
        name: str,
        folder: Path,
        report: EvaluationReport,
        lineage: Mapping[str, Any],
        copied: Callable[[], None] = lambda: None,
        decided: Mapping[str, Any] | None = None,
    ) -> VertexVersion:
        """Upload the model in `folder` and register it with its report and what the gate `decided`.
        An existing version gets the new ones, and damaged files are replaced.

        Raises:
            WrongInput: bucket or image are missing or in another region, a permission is missing,
                or somebody else's model has the id.
            Failed: another process is registering the same model.
        """
        self._check_region()
        key, bucket = model_key(report.model_hash, report.tokenizer_hash), self._bucket(name)
        spec = self._spec(name, key)
        with lease(bucket, f"ingot register {name}", name=f"locks/{key}", wait=True):
            upload_files(folder, open_bucket(bucket.url_of(key)))
            copied()
            for path, text in spec.files.items():
                bucket.put(f"{key}-{spec.mark}{REPOSITORY_SUFFIX}{path}", text.encode())
            self._write_record(name, key, folder, report, lineage, decided)
            found = self._found(name, key, spec.mark)
            if found is None:
                self._upload(name, key, report, spec)
                found = self._found(name, key, spec.mark)
            else:
                self._relabel(found, report)
                if (told := kept_image(name, found.number, spec.container.image)) is not None:
                    say(f"note: {told}")
        if found is None:
            raise Failed(
                f"{name} was registered and is not there; see {self.place}, and run the same"
                " command again"
            )
        return self._version(name, found)

    def point(self, name: str, number: int, reason: str, *, instead_of: int | None = -1) -> None:
        """Make version `number` live; see `LocalRegistry.point`. Raises Failed where another
        process changed the pointer at the same time.
        """
        known = self._listed(name)
        self.version(name, number)
        found = objects.read_pointer(self._bucket(name))
        if found.now != number:
            objects.check_expected_live(name, found.now, instead_of)
            objects.move_pointer(self._bucket(name), found, number, reason)
        self._update_alias(known, number)

    def rollback(self, name: str, reason: str, *, to: int | None = None) -> VertexVersion:
        """Make the previously live version live again; repeated calls go further back. `to`: only
        if it is that version. Raises as `previous` and `point` do.
        """
        version = self.previous(name)
        if to not in (None, version.number):
            raise another_live(name)
        objects.move_pointer(
            self._bucket(name),
            objects.read_pointer(self._bucket(name)),
            version.number,
            reason,
            back=True,
        )
        self._update_alias(self._listed(name), version.number)
        return version

    def check(self, version: VertexVersion, *, checksums: bool = False) -> None:
        """Raises WrongInput where objects of a version are missing or changed, by the checksums the
        service keeps; nothing is downloaded.
        """
        if damaged := damaged_files(open_bucket(version.where)):
            raise WrongInput(
                f"{version.name} v{version.number} is damaged: {damaged[0]} is missing or changed;"
                " register it again, or deploy another version"
            )

    def fetch(self, version: VertexVersion) -> Path:
        """The version's files in a local folder, downloaded unless they are there already."""
        bucket, files = open_bucket(version.where), listed_files(open_bucket(version.where))
        folder = (
            Path(self._recipe.output)
            / "registry-vertex"
            / version.name
            / model_key(version.model_hash, version.tokenizer_hash)
        )
        if not all(
            (folder / file["path"]).is_file()
            and (folder / file["path"]).stat().st_size == file["bytes"]
            for file in files
        ):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(folder) as partial:
                fetch_files(bucket, files, partial)
        return folder

    def _bucket(self, name: str) -> Bucket:
        """The bucket folder of a name, opened once."""
        if name not in self._buckets:
            self._buckets[name] = open_bucket(f"{self._google.bucket}/ingot/models/{name}")
        return self._buckets[name]

    def _listed(self, name: str) -> list[ModelVersion]:
        """The versions that ingot registered, oldest first; of duplicates only the first."""
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

    def _spec(self, name: str, key: str) -> ServingSpec:
        return serving_spec(self._recipe, self._bucket(name).url_of(key))

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
            value.get("gate", {}).get("decision") == "keep",
        )

    def _record(self, name: str, key: str) -> dict[str, Any] | None:
        """The stored record of a model; None where it is missing or damaged."""
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
        decided: Mapping[str, Any] | None,
    ) -> None:
        """Write the record of a model; of an existing one only the report changes, and the gate's
        decision where there is a new one.
        """
        value = self._record(name, key) or {
            "schema": SCHEMA,
            "lineage": dict(lineage),
            "classifies": is_classifier(folder),
        }
        if decided is not None:
            value["gate"] = {key: decided[key] for key in ("decision", "reason", "time")}
        value["report"] = asdict(report)
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
        self._bucket(name).put(f"{key}.json", text.encode())

    def _upload(self, name: str, key: str, report: EvaluationReport, spec: ServingSpec) -> None:
        """Create the version, once uploads that a killed process started have ended."""
        model_id = resource_id(name)
        for operation in models.running_uploads(self._google, model_id):
            models.await_upload(self._google, operation)
        if self._found(name, key, spec.mark) is not None:
            return
        artifacts = self._bucket(name).url_of(
            f"{key}-{spec.mark}{REPOSITORY_SUFFIX}".rstrip("/") if spec.files else key
        )
        for first in (not models.versions(self._google, model_id), False):
            request = models.upload_request(
                self._google,
                model_id,
                first=first,
                display_name=name,
                artifacts=artifacts,
                container=spec.container,
                labels=self._labels(report, key, spec.mark),
                description=version_description(report),
            )
            try:
                models.upload(self._google, request)
                return
            except WrongInput as error:
                if (
                    not first or http_status_of(error) != EXISTS
                ):  # another process created the first version of this name meanwhile
                    raise

    def _labels(self, report: EvaluationReport, key: str, mark: str) -> dict[str, str]:
        ours = {
            KEY: key,
            CONTAINER: mark,
            ENGINE: self._recipe.serve.engine,
            "ingot-run": label(self._recipe.name),
            "ingot-verb": "register",
        }
        return version_labels(report, ours, self._recipe.cloud.labels)

    def _relabel(self, found: ModelVersion, report: EvaluationReport) -> None:
        labels = {
            **self._labels(report, found.labels[KEY], found.labels[CONTAINER]),
            "ingot-run": found.labels.get("ingot-run", ""),
        }
        if labels != found.labels:
            models.update_labels(self._google, found, labels)

    def _update_alias(self, known: Sequence[ModelVersion], now: int | None) -> None:
        """Set the alias `live` on the version of the pointer, and on no other."""
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
