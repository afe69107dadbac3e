"""Google's own clients, each created when first used, and their errors translated to ours; the only
module that imports them.

All speak JSON over HTTPS (REST transports), so that `cloud.endpoint` may be any address that serves
Google's paths.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.service import service_message
from ingot.config.sections.deployment import Cloud

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PATIENCE_S, FIRST_WAIT_S, CALL_S = 60.0, 1.0, 120.0
"""For calls that may be repeated: how long they are retried, the first pause between attempts, and
the timeout of one attempt.
"""
LOGIN = "run `gcloud auth application-default login`"
# Service -> module and class of its client, and its host, with {region} for regional services.
SERVICES: dict[str, tuple[str, str, str]] = {
    "jobs": (
        "google.cloud.aiplatform_v1",
        "JobServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "pipelines": (
        "google.cloud.aiplatform_v1",
        "PipelineServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "schedules": (
        "google.cloud.aiplatform_v1",
        "ScheduleServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "models": (
        "google.cloud.aiplatform_v1",
        "ModelServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "endpoints": (
        "google.cloud.aiplatform_v1",
        "EndpointServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "predictions": (
        "google.cloud.aiplatform_v1",
        "PredictionServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "tensorboards": (
        "google.cloud.aiplatform_v1",
        "TensorboardServiceClient",
        "{region}-aiplatform.googleapis.com",
    ),
    "instances": ("google.cloud.compute_v1", "InstancesClient", "compute.googleapis.com"),
    "zone operations": (
        "google.cloud.compute_v1",
        "ZoneOperationsClient",
        "compute.googleapis.com",
    ),
    "machine types": ("google.cloud.compute_v1", "MachineTypesClient", "compute.googleapis.com"),
    "accelerator types": (
        "google.cloud.compute_v1",
        "AcceleratorTypesClient",
        "compute.googleapis.com",
    ),
    "compute projects": ("google.cloud.compute_v1", "ProjectsClient", "compute.googleapis.com"),
    "regions": ("google.cloud.compute_v1", "RegionsClient", "compute.googleapis.com"),
    "subnetworks": ("google.cloud.compute_v1", "SubnetworksClient", "compute.googleapis.com"),
    "batches": (
        "google.cloud.dataproc_v1",
        "BatchControllerClient",
        "{region}-dataproc.googleapis.com",
    ),
    "secrets": (
        "google.cloud.secretmanager_v1",
        "SecretManagerServiceClient",
        "secretmanager.googleapis.com",
    ),
    "builds": (
        "google.cloud.devtools.cloudbuild_v1",
        "CloudBuildClient",
        "cloudbuild.googleapis.com",
    ),
    "repositories": (
        "google.cloud.artifactregistry_v1",
        "ArtifactRegistryClient",
        "artifactregistry.googleapis.com",
    ),
    "services": (
        "google.cloud.service_usage_v1",
        "ServiceUsageClient",
        "serviceusage.googleapis.com",
    ),
    "projects": (
        "google.cloud.resourcemanager_v3",
        "ProjectsClient",
        "cloudresourcemanager.googleapis.com",
    ),
    "dataflow jobs": (
        "google.cloud.dataflow_v1beta3",
        "JobsV1Beta3Client",
        "dataflow.googleapis.com",
    ),
    "flex templates": (
        "google.cloud.dataflow_v1beta3",
        "FlexTemplatesServiceClient",
        "dataflow.googleapis.com",
    ),
}


@dataclass(frozen=True)
class GoogleClients:
    """The clients of one recipe's `cloud` section."""

    cloud: Cloud

    @property
    def project(self) -> str:
        """`cloud.project`, or the project of the credentials. Raises WrongInput if neither
        is set.
        """
        project = self.cloud.project or _credentials(self.cloud.endpoint)[1]
        if not project:
            raise WrongInput(
                "no Google Cloud project is known; set cloud.project, or $GOOGLE_CLOUD_PROJECT"
            )
        return str(project)

    @property
    def parent(self) -> str:
        """`projects/PROJECT/locations/REGION`."""
        return f"projects/{self.project}/locations/{self.cloud.region}"

    @property
    def bucket(self) -> str:
        """`gs://BUCKET`. Raises WrongInput if none is set."""
        if self.cloud.bucket is None:
            raise WrongInput("this needs a bucket where runs and models lie; set cloud.bucket")
        return f"gs://{self.cloud.bucket}"

    def client(self, service: str) -> Any:
        """The client of a service in `SERVICES`.

        Raises:
            WrongInput: there are no credentials, or a package is missing.
        """
        return _client(service, self.cloud.endpoint, self.cloud.region)

    def session(self) -> Any:
        """A `requests` session with the credentials, for services without a REST client."""
        google = google_packages()
        credentials, _ = _credentials(self.cloud.endpoint)
        return google["AuthorizedSession"](credentials)

    def host(self, service: str) -> str:
        """The host of a service in `SERVICES`."""
        return SERVICES[service][2].format(region=self.cloud.region)

    def address(self, host: str) -> str:
        """The base URL for requests to `host`."""
        return self.cloud.endpoint or f"https://{host}"


@functools.cache
def google_packages() -> dict[str, Any]:
    """The names used from Google's common packages. Raises WrongInput if they are not installed."""
    try:
        import google.api_core.exceptions as exceptions
        from google.api_core.retry import Retry, if_exception_type
        from google.auth import default
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
        from google.auth.transport.requests import AuthorizedSession
        from requests.exceptions import ConnectionError as NoConnection
    except ImportError as error:
        raise _not_installed() from error
    return {
        "exceptions": exceptions,
        "default": default,
        "Anonymous": AnonymousCredentials,
        "DefaultCredentialsError": DefaultCredentialsError,
        "RefreshError": RefreshError,
        "TransportError": TransportError,
        "AuthorizedSession": AuthorizedSession,
        "Retry": Retry,
        "if_exception_type": if_exception_type,
        "ConnectionError": NoConnection,
    }


def message_types(module: str) -> Any:
    """The message types of one of Google's client packages, such as `google.cloud.aiplatform_v1`.
    Raises WrongInput if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _not_installed() from error


@functools.cache
def _client(service: str, endpoint: str | None, region: str) -> Any:
    module, name, host = SERVICES[service]
    credentials, _ = _credentials(endpoint)
    kind = getattr(message_types(module), name)
    return kind(
        credentials=credentials,
        transport="rest",
        client_options={"api_endpoint": endpoint or host.format(region=region)},
    )


@functools.cache
def _credentials(endpoint: str | None) -> tuple[Any, str | None]:
    google = google_packages()
    if endpoint is not None and endpoint.startswith("http://"):
        return google["Anonymous"](), None
    try:
        found: tuple[Any, str | None] = google["default"](scopes=[SCOPE])
    except google["DefaultCredentialsError"] as error:
        raise WrongInput(
            f"no credentials for Google Cloud ({service_message(error)}); {LOGIN}"
        ) from error
    return found


@contextmanager
def google_errors(what: str, *, missing: str = "", denied: str = "") -> Iterator[None]:
    """Translate errors of a client into ours, in one line. `what` is the attempted action, such as
    `make the job ingot-x`; `missing` and `denied` are the next action if something is not found or
    permission is denied.

    Raises:
        WrongInput: the request cannot be fulfilled: not found, no permission, invalid, already
            exists.
        Failed: a quota is used up, or the service cannot be reached or failed; trying again may
            help.
    """
    google = google_packages()
    exceptions = google["exceptions"]
    try:
        yield
    except google["RefreshError"] as error:
        raise WrongInput(
            f"could not {what}: the credentials are refused ({service_message(error)}); {LOGIN}"
        ) from error
    except exceptions.NotFound as error:
        raise WrongInput(
            f"could not {what}: {service_message(error)};"
            f" {missing or 'check cloud.project, cloud.region and the name'}"
        ) from error
    except (exceptions.Forbidden, exceptions.Unauthorized) as error:
        raise WrongInput(
            f"could not {what}: {service_message(error)};"
            f" {denied or 'ask for the role, `ingot doctor --cloud` names what is missing'}"
        ) from error
    except exceptions.TooManyRequests as error:
        raise Failed(
            f"could not {what}: {service_message(error)}; a quota is used up: wait, ask"
            " for more, or choose another machine or region"
        ) from error
    except exceptions.ClientError as error:
        raise WrongInput(
            f"could not {what}: {service_message(error)}; mend the recipe, and run the same"
            " command again"
        ) from error
    except (exceptions.GoogleAPIError, google["TransportError"], OSError) as error:
        raise Failed(
            f"could not {what}: {service_message(error)}; run the same command again"
        ) from error


def call_api(
    call: Callable[..., Any],
    what: str,
    *,
    again: bool = True,
    missing: str = "",
    denied: str = "",
    **request: Any,
) -> Any:
    """Call a client's method with the fields of its request (or `request=` itself). With `again`,
    transient errors are retried for PATIENCE_S: only for calls that are safe to repeat. Raises as
    `google_errors` does.
    """
    google = google_packages()
    exceptions = google["exceptions"]
    passing = google["if_exception_type"](
        exceptions.InternalServerError,
        exceptions.ServiceUnavailable,
        exceptions.TooManyRequests,
        exceptions.BadGateway,
        exceptions.GatewayTimeout,
        ConnectionError,
        google["ConnectionError"],
    )
    with google_errors(what, missing=missing, denied=denied):
        retry = (
            google["Retry"](
                predicate=passing, initial=FIRST_WAIT_S, maximum=10.0, timeout=PATIENCE_S
            )
            if again
            else None
        )
        try:
            return call(**request, retry=retry, timeout=CALL_S)
        except exceptions.RetryError as error:
            raise error.cause or error from error


def _not_installed() -> WrongInput:
    return WrongInput(
        "Google Cloud needs packages that are not installed; pip install 'ingot[gcp]'"
    )
