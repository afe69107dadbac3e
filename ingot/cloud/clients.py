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
from ingot.base.remote.service import is_passing_refusal, service_message
from ingot.config.sections.deployment import Cloud

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PATIENCE_S, FIRST_WAIT_S, CALL_S = 60.0, 1.0, 120.0
"""For calls that may be repeated: how long they are retried, the first pause between attempts, and
the timeout of one attempt.
"""
FORBIDDEN, NOT_FOUND, EXISTS = 403, 404, 409
"""HTTP statuses of a refusal, for `http_status_of`."""
LOGIN = "run `gcloud auth application-default login`"
AIPLATFORM = "google.cloud.aiplatform_v1"
DENIED = "ask for the role Vertex AI User"
# Package -> its host, with {region} for regional services, and the class of each service's client.
_PACKAGES: dict[str, tuple[str, dict[str, str]]] = {
    AIPLATFORM: (
        "{region}-aiplatform.googleapis.com",
        {
            "jobs": "JobServiceClient",
            "pipelines": "PipelineServiceClient",
            "schedules": "ScheduleServiceClient",
            "models": "ModelServiceClient",
            "endpoints": "EndpointServiceClient",
            "predictions": "PredictionServiceClient",
            "tensorboards": "TensorboardServiceClient",
        },
    ),
    "google.cloud.compute_v1": (
        "compute.googleapis.com",
        {
            "instances": "InstancesClient",
            "zone operations": "ZoneOperationsClient",
            "machine types": "MachineTypesClient",
            "accelerator types": "AcceleratorTypesClient",
            "compute projects": "ProjectsClient",
            "regions": "RegionsClient",
            "subnetworks": "SubnetworksClient",
        },
    ),
    "google.cloud.dataproc_v1": (
        "{region}-dataproc.googleapis.com",
        {"batches": "BatchControllerClient"},
    ),
    "google.cloud.secretmanager_v1": (
        "secretmanager.googleapis.com",
        {"secrets": "SecretManagerServiceClient"},
    ),
    "google.cloud.devtools.cloudbuild_v1": (
        "cloudbuild.googleapis.com",
        {"builds": "CloudBuildClient"},
    ),
    "google.cloud.artifactregistry_v1": (
        "artifactregistry.googleapis.com",
        {"repositories": "ArtifactRegistryClient"},
    ),
    "google.cloud.service_usage_v1": (
        "serviceusage.googleapis.com",
        {"services": "ServiceUsageClient"},
    ),
    "google.cloud.resourcemanager_v3": (
        "cloudresourcemanager.googleapis.com",
        {"projects": "ProjectsClient"},
    ),
    "google.cloud.dataflow_v1beta3": (
        "dataflow.googleapis.com",
        {
            "dataflow jobs": "JobsV1Beta3Client",
            "flex templates": "FlexTemplatesServiceClient",
        },
    ),
}
SERVICES = {
    service: (package, client, host)
    for package, (host, clients) in _PACKAGES.items()
    for service, client in clients.items()
}
"""Package, class and host of each service's client."""


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
        if is_passing_refusal(error):
            raise Failed(
                f"could not {what}: no credentials come ({service_message(error)}); run the same"
                " command again"
            ) from error
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
                predicate=lambda error: passing(error) or is_passing_refusal(error),
                initial=FIRST_WAIT_S,
                maximum=10.0,
                timeout=PATIENCE_S,
            )
            if again
            else None
        )
        try:
            return call(**request, retry=retry, timeout=CALL_S)
        except exceptions.RetryError as error:
            raise error.cause or error from error


def list_all(call: Callable[..., Any], what: str, *, denied: str = "", **request: Any) -> list[Any]:
    """What a client's method lists, on all pages, which are requested while iterating. Raises as
    `google_errors` does.
    """
    with google_errors(what, denied=denied):
        return list(call_api(call, what, denied=denied, **request))


def call_or_none(call: Callable[..., Any], what: str, **request: Any) -> Any | None:
    """The answer to a call; None if the object does not exist. Raises as `call_api` does."""
    try:
        return call_api(call, what, **request)
    except WrongInput as error:
        if http_status_of(error) == NOT_FOUND:
            return None
        raise


def create_once(call: Callable[..., Any], what: str, **request: Any) -> None:
    """Create an object under a name of our own. An existing one is ours: an earlier answer was
    lost. Raises as `call_api` does.
    """
    try:
        call_api(call, what, **request)
    except WrongInput as error:
        if http_status_of(error) != EXISTS:
            raise


def http_status_of(error: BaseException) -> int | None:
    """The HTTP status of Google's refusal behind an error raised by `call_api` or `google_errors`;
    None if there was none.
    """
    code = getattr(error.__cause__, "code", None)
    return int(code) if code is not None else None


def _not_installed() -> WrongInput:
    return WrongInput(
        "Google Cloud needs packages that are not installed; pip install 'ingot[gcp]'"
    )
