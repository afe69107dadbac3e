"""Secrets out of Secret Manager, through Google's client against `tests/fakes/project.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud import clients
from ingot.cloud.clients import GoogleClients
from ingot.cloud.secrets import resolve_secrets
from ingot.config.sections.deployment import Cloud
from tests.fakes import project
from tests.fakes.google import Server


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[project.State]:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(clients, "PATIENCE_S", 0.3)
    server = Server()
    yield project.install(server)
    server.server_close()


def google_of(there: project.State) -> GoogleClients:
    return GoogleClients(Cloud(project="proj", endpoint=there.server.address))


def test_the_newest_version_or_the_one_that_is_named(there: project.State) -> None:
    there.secrets["key"] = [b"first", b"second"]
    wanted = {"HF_TOKEN": "secret:hf-token", "OLD": "secret:key/1", "NEW": "secret:key/latest"}
    assert resolve_secrets(google_of(there), wanted) == {
        "HF_TOKEN": "hunter2",
        "OLD": "first",
        "NEW": "second",
    }
    assert resolve_secrets(google_of(there), {}) == {}


@pytest.mark.parametrize(
    "reference",
    [
        "secret:",
        "secret:a/b/c",
        "secret:hf-token/0",
        "secret:hf token",
        "hunter2",
        "secret:hf-token/newest",
    ],
)
def test_what_is_no_reference_is_not_repeated(there: project.State, reference: str) -> None:
    with pytest.raises(
        WrongInput, match=r"cloud.secrets.HF_TOKEN is no reference; write secret:NAME"
    ) as raised:
        resolve_secrets(google_of(there), {"HF_TOKEN": reference})
    assert "hunter2" not in str(raised.value)
    assert there.server.calls == []


def test_a_secret_that_is_missing_says_how_to_make_it(there: project.State) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r'could not read the secret nothing for \$KEY: .*; printf %s "\$KEY" \| gcloud secrets'
            r" create nothing --data-file=-"
        ),
    ):
        resolve_secrets(google_of(there), {"KEY": "secret:nothing"})
    with pytest.raises(WrongInput, match="gcloud secrets versions list hf-token --project=proj"):
        resolve_secrets(google_of(there), {"KEY": "secret:hf-token/7"})


def test_a_secret_that_may_not_be_read_says_which_role(there: project.State) -> None:
    there.server.fault(
        "SecretManagerService.AccessSecretVersion",
        403,
        message="Permission 'secretmanager.versions.access' denied",
    )
    with pytest.raises(
        WrongInput,
        match=(
            r"gcloud secrets add-iam-policy-binding hf-token .*roles/secretmanager.secretAccessor"
            r" --project=proj"
        ),
    ):
        resolve_secrets(google_of(there), {"HF_TOKEN": "secret:hf-token"})


def test_a_version_that_is_disabled(there: project.State) -> None:
    there.server.fault(
        "SecretManagerService.AccessSecretVersion",
        400,
        message="Secret Version [hf-token/2] is in DISABLED state.",
    )
    with pytest.raises(WrongInput, match="DISABLED state"):
        resolve_secrets(google_of(there), {"HF_TOKEN": "secret:hf-token"})


def test_a_service_that_is_away_is_asked_again_for_a_while(there: project.State) -> None:
    there.server.fault("SecretManagerService.AccessSecretVersion", 503, times=2)
    assert resolve_secrets(google_of(there), {"HF_TOKEN": "secret:hf-token"}) == {
        "HF_TOKEN": "hunter2"
    }
    there.server.fault("SecretManagerService.AccessSecretVersion", 503, times=10_000)
    with pytest.raises(Failed, match=r"could not read the secret hf-token for \$HF_TOKEN"):
        resolve_secrets(google_of(there), {"HF_TOKEN": "secret:hf-token"})


@pytest.mark.parametrize("data", [b"", b"\n", b"\xff\xfe", b"a\0b"])
def test_what_cannot_be_a_variable_is_refused_without_telling_it(
    there: project.State, data: bytes
) -> None:
    there.secrets["hf-token"] = [data]
    with pytest.raises(WrongInput, match="is empty or no text; add a version"):
        resolve_secrets(google_of(there), {"HF_TOKEN": "secret:hf-token"})


def test_a_value_that_was_damaged_on_its_way_is_refused(
    there: project.State, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = there.secret

    def damaged(request: object) -> object:
        answer = whole(request)
        answer.payload.data_crc32c ^= 1
        return answer

    there.server.on("SecretManagerService.AccessSecretVersion", damaged)
    with pytest.raises(Failed, match="arrived damaged") as raised:
        resolve_secrets(google_of(there), {"HF_TOKEN": "secret:hf-token"})
    said = capsys.readouterr()
    assert "hunter2" not in f"{raised.value}{said.out}{said.err}"
