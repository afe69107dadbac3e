"""Reads rows from BigQuery through Google's own client, with the credentials of the environment.

A query runs in the location of its tables, which BigQuery finds itself; `cloud.region` is not used,
since runs may be in another region. The result goes to an anonymous table, which BigQuery keeps for
a day and limits to 10 GB (compressed).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ingot.base.errors import Failed, WrongInput, one_line
from ingot.base.remote.service import is_passing_refusal

PAGE_ROWS = 50_000
"""Upper limit only: the service ends a page at about 20 MB, which bounds memory, while short rows
do not cost a request for every few of them.
"""
TOO_LARGE = "responseTooLarge"
FILES_INSTEAD = (
    'let it write files, `bq query --nouse_legacy_sql "EXPORT DATA'
    " OPTIONS(uri='gs://BUCKET/FOLDER/*.parquet', format='PARQUET') AS SELECT ...\"`, and give"
    " gs://BUCKET/FOLDER/*.parquet as the source"
)
RETRY_S = 60.0
EMULATOR = "BIGQUERY_EMULATOR_HOST"


def query_rows(sql: str, *, project: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a query, with one page at a time in memory. `project` is billed; None means the
    environment's project.

    Raises:
        WrongInput: the query is wrong or not allowed, its result is too large, there are no
            credentials or no project, or the package is missing.
        Failed: the service cannot be reached or fails.
    """
    client = _client(project)
    from google.api_core.exceptions import ClientError, GoogleAPIError
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.bigquery import DEFAULT_RETRY

    retry = DEFAULT_RETRY.with_timeout(RETRY_S)
    try:
        for page in (
            client.query(sql, retry=retry, job_retry=None)
            .result(page_size=PAGE_ROWS, retry=retry, job_retry=None)
            .pages
        ):
            for row in page:
                yield dict(row.items())
    except RefreshError as error:
        if is_passing_refusal(error):
            raise Failed(
                f"no credentials for BigQuery come ({one_line(error)}); run the same command again"
            ) from error
        raise WrongInput(
            f"the credentials for BigQuery are refused ({one_line(error)}); run `gcloud auth"
            " application-default login`"
        ) from error
    except ClientError as error:
        if any(one.get("reason") == TOO_LARGE for one in error.errors):
            raise WrongInput(
                "the query's result is larger than BigQuery hands out (10 GB, compressed);"
                f" {FILES_INSTEAD}"
            ) from error
        raise WrongInput(
            f"BigQuery refuses the query ({error.code}: {one_line(error.message)}); mend it, or ask"
            " for the rights"
        ) from error
    except (GoogleAPIError, TransportError, OSError) as error:
        raise Failed(
            f"BigQuery cannot be reached or broke down ({one_line(error)}); run the same command"
            " again"
        ) from error


def _client(project: str | None) -> Any:
    try:
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.bigquery import Client
    except ImportError as error:
        raise WrongInput(
            "a bigquery: source needs a package that is not installed; pip install 'ingot[gcp]'"
        ) from error
    anonymous: Any = AnonymousCredentials
    try:
        # An emulator needs no credentials; the client reads its address from the environment.
        return (
            Client(project=project, credentials=anonymous())
            if os.environ.get(EMULATOR)
            else Client(project=project)
        )
    except DefaultCredentialsError as error:
        raise WrongInput(
            f"no credentials for BigQuery ({one_line(error)}); run `gcloud auth application-default"
            " login`"
        ) from error
    except OSError as error:
        raise WrongInput(
            f"no project for BigQuery ({one_line(error)}); set cloud.project, or"
            " $GOOGLE_CLOUD_PROJECT"
        ) from error
