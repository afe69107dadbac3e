"""Secrets by reference, from Secret Manager. Values go only into the environment of a verb; no
error and no log contains one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.service import google_packages
from ingot.cloud.clients import GoogleClients, call_api

_REFERENCE = re.compile(r"secret:([A-Za-z0-9_-]{1,255})(?:/([1-9][0-9]*|latest))?", re.ASCII)


def parse_reference(variable: str, reference: str) -> tuple[str, str]:
    """Name and version (default `latest`) in `secret:NAME` or `secret:NAME/VERSION`. Raises
    WrongInput for anything else.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        # The value may be the secret itself, so it is not repeated in the message.
        raise WrongInput(
            f"cloud.secrets.{variable} is no reference; write secret:NAME, or secret:NAME/VERSION"
            " with a number"
        )
    return found[1], found[2] or "latest"


def resolve_secrets(google: GoogleClients, references: Mapping[str, str]) -> dict[str, str]:
    """The values behind references, by variable: `{"HF_TOKEN": "secret:hf-token"}`.

    Raises:
        WrongInput: names the variable and the secret that is missing, disabled or not readable.
        Failed: the service cannot be reached, or returned a damaged value.
    """
    wanted = {
        variable: parse_reference(variable, reference) for variable, reference in references.items()
    }
    return {
        variable: _value(google, variable, name, version)
        for variable, (name, version) in wanted.items()
    }


def _value(google: GoogleClients, variable: str, name: str, version: str) -> str:
    project = google.project
    answer = call_api(
        google.client("secrets").access_secret_version,
        f"read the secret {name} for ${variable}",
        missing=(
            f'printf %s "${variable}" | gcloud secrets create {name} --data-file=-'
            f" --project={project}"
            if version == "latest"
            else f"see gcloud secrets versions list {name} --project={project}"
        ),
        denied=(
            f"gcloud secrets add-iam-policy-binding {name}"
            f" --member=serviceAccount:{google.cloud.service_account or 'ACCOUNT'}"
            f" --role=roles/secretmanager.secretAccessor --project={project}"
        ),
        request={"name": f"projects/{project}/secrets/{name}/versions/{version}"},
    )
    data: bytes = answer.payload.data
    if "data_crc32c" in answer.payload and answer.payload.data_crc32c != _crc32c(data):
        raise Failed(
            f"the secret {name} for ${variable} arrived damaged; run the same command again"
        )
    try:
        value = data.decode("utf-8").strip("\r\n")
    except UnicodeDecodeError:
        value = ""
    if not value or "\0" in value:
        raise WrongInput(
            f"the secret {name} for ${variable} is empty or no text; add a version: gcloud secrets"
            f" versions add {name} --data-file=-"
        )
    return value


def _crc32c(data: bytes) -> int:
    checksum = google_packages().Checksum(data).digest()
    return int.from_bytes(checksum, "big")
