"""`ingot doctor --cloud` against `tests/fakes/project.py`: each thing missing alone has its own
line and command, and the others stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.remote import bucket as objects
from ingot.cli.doctor import examine_cloud
from ingot.cloud import clients
from tests import gcs
from tests.fakes import project
from tests.fakes.google import Server

RECIPE = [
    "launch.kind=gce",
    "launch.nodes=2",
    "launch.machine={type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 2}",
    "registry.kind=vertex",
    "serve.machine={type: n1-standard-8}",
    "pipeline.steps={prepare: {launch: dataproc}}",
    "data.train=[{source: 'bigquery:SELECT 1'}]",
    "cloud.secrets={HF_TOKEN: 'secret:hf-token'}",
    "cloud.tensorboard='4242'",
    "cloud.subnetwork=sub",
    "cloud.repository=ingot",
    "cloud.bucket=bucket",
    f"cloud.service_account={project.ACCOUNT}",
]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[project.State]:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(clients, "PATIENCE_S", 0.3)
    server = Server()
    with gcs.serving(monkeypatch) as storage:
        state = project.install(server)
        server.storage = storage  # type: ignore[attr-defined]
        storage.bindings = [
            {"role": "roles/storage.objectUser", "members": [f"serviceAccount:{project.ACCOUNT}"]}
        ]
        yield state
    server.server_close()


class Told:
    """What the doctor printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err, self.lines = code, out, err, out.splitlines()

    def marked(self, mark: str) -> list[str]:
        return [line.removeprefix(mark).strip() for line in self.lines if line.startswith(mark)]

    def command_of(self, what: str) -> str:
        """The command under the line that begins so."""
        at = next(
            number for number, line in enumerate(self.lines) if line[8:].strip().startswith(what)
        )
        return (
            self.lines[at + 1].strip()
            if at + 1 < len(self.lines) and self.lines[at + 1].startswith("         ")
            else ""
        )


@pytest.fixture
def doctor(there: project.State, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def ask(*more: str, recipe: list[str] = RECIPE) -> Told:
        code = examine_cloud(
            [*recipe, "cloud.project=proj", f"cloud.endpoint={there.server.address}", *more]
        )
        said = capsys.readouterr()
        return Told(code, said.out, said.err)

    return ask


def storage_of(there: project.State) -> gcs.Server:
    return there.server.storage  # type: ignore[attr-defined, no-any-return]


def test_where_all_is_there_nothing_is_missing(doctor: Callable[..., Told]) -> None:
    told = doctor()
    assert told.code == 0, told.out
    assert told.marked("missing") == []
    assert told.err == ""
    wanted = (
        "project proj",
        "service Vertex AI",
        "service Dataproc",
        "BigQuery Job User",
        "bucket gs://bucket",
        "repository ingot",
        "ingot-train",
        "ingot-spark",
        "ingot-serve",
        "subnetwork sub",
        "secret for $HF_TOKEN",
        "TensorBoard 4242",
        "machine type n1-standard-8",
        "accelerator nvidia-tesla-t4",
        "quota CPUS",
        "quota NVIDIA_T4_GPUS",
        "quota GPUS_ALL_REGIONS",
    )
    assert not [name for name in wanted if not any(name in line for line in told.marked("ok"))]
    assert "hunter2" not in told.out


def _without(**kinds: Any) -> Callable[[project.State], None]:
    """Take something away: `roles="roles/x"`, `on="compute"`, ..."""

    def take(state: project.State) -> None:
        for name, key in kinds.items():
            holder = getattr(state, name)
            if isinstance(holder, set):
                holder.discard(key)
            else:
                del holder[key]

    return take


MISSING: list[tuple[str, Callable[[project.State], None], str, str]] = [
    *(
        (
            f"service {service}",
            _without(on=service),
            f"service {title}",
            f"gcloud services enable {service}.googleapis.com --project=proj",
        )
        for service, title in (
            ("cloudbuild", "Cloud Build"),
            ("bigquery", "BigQuery"),
            ("storage", "Cloud Storage"),
            ("dataproc", "Dataproc"),
            ("iam", "IAM"),
            ("logging", "Cloud Logging"),
        )
    ),
    *(
        (
            role,
            _without(roles=role),
            f"{project.ACCOUNT}: {title}",
            (
                "gcloud projects add-iam-policy-binding proj"
                f" --member=serviceAccount:{project.ACCOUNT} --role={role} --condition=None"
            ),
        )
        for role, title in (
            ("roles/bigquery.jobUser", "BigQuery Job User"),
            ("roles/dataproc.worker", "Dataproc Worker"),
            ("roles/aiplatform.user", "Vertex AI User"),
            ("roles/secretmanager.secretAccessor", "Secret Manager Secret Accessor"),
            ("roles/artifactregistry.writer", "Artifact Registry Writer"),
            ("roles/logging.logWriter", "Logs Writer"),
            ("roles/compute.instanceAdmin.v1", "Compute Instance Admin (v1)"),
        )
    ),
    *(
        (
            permission,
            lambda state, permission=permission: state.lacking.add(permission),
            f"you: {title}",  # type: ignore[misc]
            (
                'gcloud projects add-iam-policy-binding proj --member="user:$(gcloud config'
                f' get-value account)" --role={role} --condition=None'
            ),
        )
        for permission, title, role in (
            ("cloudbuild.builds.create", "Cloud Build Editor", "roles/cloudbuild.builds.editor"),
            ("bigquery.jobs.create", "BigQuery Job User", "roles/bigquery.jobUser"),
            (
                "compute.instances.create",
                "Compute Instance Admin (v1)",
                "roles/compute.instanceAdmin.v1",
            ),
            ("dataproc.batches.create", "Dataproc Editor", "roles/dataproc.editor"),
            ("aiplatform.customJobs.create", "Vertex AI User", "roles/aiplatform.user"),
        )
    ),
    (
        "repository",
        _without(repositories="ingot"),
        "repository ingot: not in us-central1",
        (
            "gcloud artifacts repositories create ingot --repository-format=docker"
            " --location=us-central1 --project=proj"
        ),
    ),
    (
        "image",
        _without(images="ingot-spark"),
        (
            "image us-central1-docker.pkg.dev/proj/ingot/ingot-spark: not built yet, and"
            " pipeline.steps.prepare"
        ),
        (
            "ingot images build spark cloud.project=proj cloud.region=us-central1"
            " cloud.repository=ingot cloud.bucket=bucket"
        ),
    ),
    (
        "subnetwork",
        _without(subnetworks="sub"),
        "subnetwork sub: not in us-central1",
        (
            "gcloud compute networks subnets create sub --network=default --range=10.0.0.0/20"
            " --enable-private-ip-google-access --region=us-central1 --project=proj"
        ),
    ),
    (
        "private access",
        lambda state: state.subnetworks.update(sub=False),
        "subnetwork sub: there, without Private Google Access",
        (
            "gcloud compute networks subnets update sub --enable-private-ip-google-access"
            " --region=us-central1 --project=proj"
        ),
    ),
    (
        "secret",
        _without(secrets="hf-token"),
        "secret for $HF_TOKEN",
        'printf %s "$HF_TOKEN" | gcloud secrets create hf-token --data-file=- --project=proj',
    ),
    (
        "tensorboard",
        _without(tensorboards="4242"),
        "TensorBoard 4242: not in us-central1",
        (
            "gcloud ai tensorboards create --display-name=ingot --region=us-central1 --project=proj"
            "   # then set cloud.tensorboard to its id"
        ),
    ),
    (
        "machine quota",
        lambda state: state.quotas.update(CPUS=(24, 10)),
        "quota CPUS (launch.machine): 16 needed, 14 of 24 free",
        (
            "gcloud beta quotas preferences create --service=compute.googleapis.com"
            " --quota-id=CPUS-per-project-region --preferred-value=26"
            " --dimensions=region=us-central1 --project=proj"
        ),
    ),
    (
        "GPU quota",
        lambda state: state.quotas.update(NVIDIA_T4_GPUS=(4, 1)),
        "quota NVIDIA_T4_GPUS (launch.machine): 4 needed, 3 of 4 free",
        (
            "gcloud beta quotas preferences create --service=compute.googleapis.com"
            " --quota-id=NVIDIA-T4-GPUS-per-project-region --preferred-value=5"
            " --dimensions=region=us-central1 --project=proj"
        ),
    ),
    (
        "GPUs of all regions",
        lambda state: state.worldwide.update(GPUS_ALL_REGIONS=(0, 0)),
        "quota GPUS_ALL_REGIONS (launch.machine): 4 needed, 0 of 0 free",
        (
            "gcloud beta quotas preferences create --service=compute.googleapis.com"
            " --quota-id=GPUS-ALL-REGIONS-per-project --preferred-value=4 --project=proj"
        ),
    ),
]


@pytest.mark.drawn(keep=12)
@pytest.mark.parametrize(
    ("take", "line", "command"), [case[1:] for case in MISSING], ids=[case[0] for case in MISSING]
)
def test_each_thing_missing_alone_has_its_line_and_its_command(
    there: project.State,
    doctor: Callable[..., Told],
    take: Callable[[project.State], None],
    line: str,
    command: str,
) -> None:
    take(there)
    told = doctor()
    assert told.code == 1
    (only,) = told.marked("missing")
    assert only.startswith(line), only
    assert told.command_of(line) == command
    assert told.err.startswith("missing and needed: ")


@pytest.mark.parametrize(
    ("service", "unknown"),
    [
        ("compute", {"subnetwork", "machine types", "quota"}),
        ("secretmanager", set()),
        ("artifactregistry", {"repository"}),
        ("aiplatform", {"TensorBoard"}),
    ],
)
def test_a_service_that_is_off_is_told_and_what_needs_it_is_unknown(
    there: project.State, doctor: Callable[..., Told], service: str, unknown: set[str]
) -> None:
    there.on.discard(service)
    told = doctor()
    assert told.code == 1
    assert (
        told.command_of(
            "service "
            + {
                "compute": "Compute",
                "secretmanager": "Secret",
                "artifactregistry": "Artifact",
                "aiplatform": "Vertex",
            }[service]
        )
        == f"gcloud services enable {service}.googleapis.com --project=proj"
    )
    assert {line.split(":")[0] for line in told.marked("unknown")} - {
        "quota of Vertex AI"
    } == unknown
    assert any(line.startswith("bucket gs://bucket") for line in told.marked("ok"))


def test_a_resource_manager_that_is_off_leaves_the_others_alone(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    there.on.discard("cloudresourcemanager")
    told = doctor()
    assert told.code == 1
    assert (
        told.command_of("service Resource Manager")
        == "gcloud services enable cloudresourcemanager.googleapis.com --project=proj"
    )
    assert any(line.startswith("repository ingot") for line in told.marked("ok"))
    assert any(line.startswith("your rights: not known") for line in told.marked("unknown"))


DENIED = {
    "ServiceUsage.BatchGetServices": "services",
    "Projects.GetIamPolicy": "roles of the jobs' account",
    "ArtifactRegistry.GetRepository": "repository",
    "ArtifactRegistry.GetTag": "repository",
    "Subnetworks.Get": "subnetwork",
    "TensorboardService.GetTensorboard": "TensorBoard",
    "MachineTypes.Get": "machine types",
    "AcceleratorTypes.Get": "machine types",
    "Regions.Get": "quota",
    "Projects.Get": "quota",
    "Projects.TestIamPermissions": "your rights",
}


@pytest.mark.parametrize("method", DENIED)
def test_what_may_not_be_looked_at_is_unknown_and_the_others_go_on(
    there: project.State, doctor: Callable[..., Told], method: str
) -> None:
    there.server.fault(method, 403, times=1000, message="Permission 'x.get' denied on resource")
    told = doctor()
    assert told.code == 0, told.out
    assert told.marked("missing") == []
    assert any(
        line.startswith(f"{DENIED[method]}: not known: Permission 'x.get' denied")
        for line in told.marked("unknown")
    )
    assert "--role=roles/viewer" in told.command_of(DENIED[method] + ": not known")
    assert any(line.startswith("secret for") for line in told.marked("ok"))


@pytest.mark.parametrize(
    "method", ["ServiceUsage.BatchGetServices", "ArtifactRegistry.GetRepository", "Regions.Get"]
)
def test_what_breaks_down_is_unknown_and_the_others_go_on(
    there: project.State, doctor: Callable[..., Told], method: str
) -> None:
    there.server.fault(method, 503, times=10_000)
    told = doctor()
    assert told.code == 0
    assert any("not known: on purpose" in line for line in told.marked("unknown"))
    assert len(told.marked("ok")) > 10


def test_a_secret_that_may_not_be_read_is_missing(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    there.server.fault(
        "SecretManagerService.AccessSecretVersion", 403, times=9, message="Permission denied"
    )
    told = doctor()
    assert told.code == 1
    assert told.command_of("secret for $HF_TOKEN").startswith(
        "gcloud secrets add-iam-policy-binding hf-token --member=serviceAccount:"
    )


def test_another_project_is_told_at_once(doctor: Callable[..., Told]) -> None:
    told = doctor("cloud.project=other")
    assert told.code == 1
    assert told.marked("missing")[0].startswith("project other: could not look at the project")
    assert told.command_of("project other") == "gcloud projects list"


def test_no_project_and_no_credentials_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    clients._credentials.cache_clear()
    clients._client.cache_clear()
    with pytest.raises(
        WrongInput, match=r"no credentials for Google Cloud .*gcloud auth application-default login"
    ):
        examine_cloud(["cloud.project=proj"])
    with pytest.raises(WrongInput, match=r"no Google Cloud project is known; set cloud.project"):
        examine_cloud(["cloud.endpoint=http://127.0.0.1:9"])


def test_only_what_the_recipe_needs_is_needed(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    for service in ("dataproc", "bigquery", "aiplatform", "compute", "secretmanager"):
        there.on.discard(service)
    there.roles.clear()
    told = doctor(recipe=["cloud.bucket=bucket", f"cloud.service_account={project.ACCOUNT}"])
    assert told.code == 0, told.out
    assert {line.split(":")[0] for line in told.marked("missing")} == {
        "service Dataproc (Managed Service for Apache Spark)",
        "service BigQuery",
        "service Vertex AI (Gemini Enterprise Agent Platform)",
        "service Compute Engine",
        "service Secret Manager",
    }
    assert all("does without it" in line for line in told.marked("missing"))


@pytest.mark.parametrize(
    ("recipe", "needed"),
    [
        (["launch.kind=gce"], "Compute Engine"),
        (["launch.kind=vertex"], "Vertex AI"),
        (["registry.kind=vertex"], "Vertex AI"),
        (["pipeline.steps={prepare: {launch: dataproc}}"], "Dataproc"),
        (["pipeline.steps={prepare: {launch: dataflow}}"], "Dataflow"),
        (["launch.kind=tpu"], "Cloud TPU"),
        (["data.train=[{source: 'bigquery:SELECT 1'}]"], "BigQuery"),
        (["cloud.secrets={A: 'secret:hf-token'}"], "Secret Manager"),
        (["pipeline.retries=1"], "Vertex AI"),
        (["launch.kind=gce", "cloud.repository=ingot"], "Artifact Registry"),
    ],
)
def test_each_knob_needs_its_service(
    there: project.State, doctor: Callable[..., Told], recipe: list[str], needed: str
) -> None:
    there.on = {"serviceusage", "cloudresourcemanager"}
    told = doctor(recipe=recipe)
    assert told.code == 1
    assert any(
        line.startswith(f"service {needed}") and "needs it" in line
        for line in told.marked("missing")
    )


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (
            ["launch.machine={type: n1-standard-9}"],
            (
                "machine type n1-standard-9 (launch.machine): not in us-central1-a, us-central1-b,"
                " us-central1-c, us-central1-d, us-central1-f; near are n1-standard-8"
            ),
        ),
        (
            ["launch.machine={type: n1-standard-8, accelerator: nvidia-tesla-t5}"],
            "accelerator nvidia-tesla-t5 (launch.machine): not in us-central1-a",
        ),
        (
            [
                "launch.machine={type: n1-standard-8, accelerator: nvidia-tesla-p100}",
                "cloud.zone=us-central1-a",
            ],
            (
                "accelerator nvidia-tesla-p100 (launch.machine): not in us-central1-a; near are"
                " nvidia-tesla-v100, nvidia-tesla-t4"
            ),
        ),
        (
            ["launch.machine={type: n1-standard-16, accelerator: nvidia-tesla-p100}"],
            (
                "accelerator nvidia-tesla-p100 (launch.machine): in us-central1-b, where"
                " n1-standard-16 is not"
            ),
        ),
    ],
)
def test_unknown_machines_are_told_with_the_nearest(
    doctor: Callable[..., Told], knobs: list[str], says: str
) -> None:
    told = doctor(*knobs)
    assert told.code == 1
    assert any(line.startswith(says) for line in told.marked("missing")), told.out


def test_vertex_spelling_of_an_accelerator_is_understood(doctor: Callable[..., Told]) -> None:
    told = doctor(
        "launch.machine={type: n1-standard-8, accelerator: NVIDIA_TESLA_T4, accelerators: 1}"
    )
    assert told.code == 0
    assert any(line.startswith("accelerator nvidia-tesla-t4") for line in told.marked("ok"))


def test_machines_that_bring_their_accelerators_count_in_their_own_quotas(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    there.quotas["NVIDIA_A100_GPUS"] = (15, 0)
    told = doctor("launch.machine={type: a2-highgpu-8g}")
    assert told.code == 1
    assert any(
        line.startswith("quota A2_CPUS (launch.machine): 192 needed, 192 of 192 free")
        for line in told.marked("ok")
    )
    assert told.marked("missing") == [
        "quota NVIDIA_A100_GPUS (launch.machine): 16 needed, 15 of 15 free"
    ]


def test_spot_counts_in_its_own_quota_where_there_is_one(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    told = doctor(
        "launch.machine={type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 2, spot:"
        " true}"
    )
    assert any(
        line.startswith("quota PREEMPTIBLE_NVIDIA_T4_GPUS (launch.machine): 4 needed, 4 of 4 free")
        for line in told.marked("ok")
    )
    assert any(
        line.startswith("quota CPUS (launch.machine): 16 needed") for line in told.marked("ok")
    )
    there.quotas["PREEMPTIBLE_NVIDIA_T4_GPUS"] = (3, 0)
    told = doctor(
        "launch.machine={type: n1-standard-8, accelerator: nvidia-tesla-t4, accelerators: 2, spot:"
        " true}"
    )
    assert told.code == 1


def test_a_quota_that_is_not_told_is_unknown(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    del there.quotas["NVIDIA_T4_GPUS"]
    told = doctor()
    assert told.code == 0
    assert any(
        line.startswith(
            "quota NVIDIA_T4_GPUS (launch.machine): 4 needed; Compute Engine tells no limit"
        )
        for line in told.marked("unknown")
    )


def test_a_bucket_that_is_not_there(there: project.State, doctor: Callable[..., Told]) -> None:
    told = doctor("cloud.bucket=other")
    assert told.code == 1
    assert told.marked("missing") == ["bucket gs://other: does not exist"]
    assert (
        told.command_of("bucket gs://other")
        == "gcloud storage buckets create gs://other --location=us-central1"
        " --uniform-bucket-level-access --project=proj"
    )


def test_a_bucket_of_another_region(there: project.State, doctor: Callable[..., Told]) -> None:
    storage_of(there).location = "EUROPE-WEST4"
    told = doctor()
    assert told.code == 1
    assert told.marked("missing") == [
        "bucket gs://bucket: in EUROPE-WEST4, not where cloud.region us-central1 computes"
    ]
    assert told.command_of("bucket gs://bucket").startswith(
        "gcloud storage buckets create gs://bucket-us-central1 --location=us-central1"
    )


def test_rights_on_the_bucket(there: project.State, doctor: Callable[..., Told]) -> None:
    storage_of(there).lacking = {"storage.objects.delete"}
    told = doctor()
    assert told.marked("missing") == [
        "bucket gs://bucket: your rights: you lack storage.objects.delete"
    ]
    assert told.command_of("bucket gs://bucket: your rights").startswith(
        "gcloud storage buckets add-iam-policy-binding gs://bucket --role=roles/storage.objectUser"
        ' --member="user:'
    )
    storage_of(there).lacking, storage_of(there).bindings = set(), []
    assert doctor().code == 0  # the project grants it
    del there.roles["roles/storage.objectUser"]
    told = doctor()
    assert told.code == 1
    assert told.command_of(f"bucket gs://bucket: rights of {project.ACCOUNT}").endswith(
        f"--member=serviceAccount:{project.ACCOUNT}"
    )


def test_a_bucket_that_may_not_be_looked_at_is_unknown(
    there: project.State, doctor: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert objects.FIRST_PAUSE_S < 1
    storage_of(there).fault(
        "bucket", times=9, code=403, message="does not have storage.buckets.get access"
    )
    told = doctor()
    assert told.code == 0
    assert any(line.startswith("bucket gs://bucket: not known:") for line in told.marked("unknown"))


def test_a_role_that_holds_another_does(there: project.State, doctor: Callable[..., Told]) -> None:
    there.roles = {"roles/editor": [f"serviceAccount:{project.ACCOUNT}"]}
    told = doctor()
    assert [line.split(":")[1].strip() for line in told.marked("missing")] == [
        "Secret Manager Secret Accessor"
    ]


def test_the_account_of_a_tpu_must_be_able_to_delete_it(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    there.on.add("tpu")
    knobs = (
        "launch.kind=tpu",
        "cloud.bucket=bucket",
        "cloud.images.train=i",
        f"cloud.service_account={project.ACCOUNT}",
    )
    assert doctor(recipe=list(knobs)).code == 0
    del there.roles["roles/tpu.admin"]
    told = doctor(recipe=list(knobs))
    assert told.code == 1
    assert (
        told.command_of(f"{project.ACCOUNT}: TPU Admin")
        == f"gcloud projects add-iam-policy-binding proj --member=serviceAccount:{project.ACCOUNT}"
        " --role=roles/tpu.admin --condition=None"
    )


def test_a_role_under_a_condition_does_not_count(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    there.conditions["roles/aiplatform.user"] = "request.time < timestamp('2026-01-01T00:00:00Z')"
    assert doctor().code == 1


def test_the_default_account_is_the_project_number_s(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    told = doctor(recipe=[item for item in RECIPE if "service_account" not in item])
    assert any(
        line.startswith(f"{project.NUMBER}-compute@developer.gserviceaccount.com: Vertex AI User")
        for line in told.marked("missing")
    )


def test_the_default_account_of_custom_jobs_is_an_agent_of_vertex_ai(
    there: project.State, doctor: Callable[..., Told]
) -> None:
    agent, default = (
        f"service-{project.NUMBER}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com",
        f"{project.NUMBER}-compute@developer.gserviceaccount.com",
    )
    alone = doctor(recipe=["launch.kind=vertex", "cloud.bucket=bucket"])
    assert f"--member=serviceAccount:{agent} --role=roles/aiplatform.user" in alone.out
    assert default not in alone.out
    both = doctor(
        recipe=[
            "launch.kind=vertex",
            "cloud.bucket=bucket",
            "pipeline.steps={prepare: {launch: dataproc}}",
        ]
    )
    models = doctor(recipe=["registry.kind=vertex", "cloud.bucket=bucket"])
    assert [told.out.count(agent) for told in (both, models)] == [0, 0]
    assert f"--member=serviceAccount:{default} --role=roles/aiplatform.user" in both.out


def test_settings_that_are_missing_are_told_with_what_makes_them(
    doctor: Callable[..., Told],
) -> None:
    told = doctor(recipe=["launch.kind=gce"])
    assert told.code == 1
    assert (
        told.command_of("bucket: none is set")
        == "gcloud storage buckets create gs://BUCKET --location=us-central1"
        " --uniform-bucket-level-access --project=proj   # then set cloud.bucket"
    )
    assert told.command_of("repository: none is set").endswith(
        "--location=us-central1 --project=proj   # then set cloud.repository"
    )


def test_looking_changes_nothing(there: project.State, doctor: Callable[..., Told]) -> None:
    doctor()
    changing = [
        call.method
        for call in there.server.calls
        if not any(word in call.method for word in ("Get", "List", "Test", "Access"))
    ]
    assert changing == []
    assert storage_of(there).written == []
