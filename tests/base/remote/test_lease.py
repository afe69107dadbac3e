"""One run, one writer, on a bucket: a second is refused while the first lives, and need not wait
for one that is dead.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingot.base.errors import Failed
from ingot.base.remote import lease as lease_module
from ingot.base.remote.bucket import Bucket, open_bucket
from ingot.base.remote.lease import lease
from ingot.base.remote.service import Missing
from tests.gcs import Server, serving
from tests.patience import PATIENCE_S

KEY = "runs/one/lease"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(monkeypatch) as running:
        yield running


@pytest.fixture
def bucket(server: Server) -> Bucket:
    return open_bucket("gs://bucket/runs/one", patience_s=60)


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_second_run_is_refused_at_once_and_told_who_holds_it(
    server: Server, bucket: Bucket
) -> None:
    with lease(bucket, "run one"):
        began = time.monotonic()
        told = (
            r"gs://bucket/runs/one is in use by run one \(process \d+ on .*\), which said so \d+ s"
            r" ago; stop it"
        )
        with pytest.raises(Failed, match=told), lease(bucket, "two"):
            pass
        assert time.monotonic() - began < lease_module.LIFE_S / 2
        with lease(bucket, "two", name="other"), lease(open_bucket("gs://bucket/runs/two"), "two"):
            pass
    assert not server.objects, "released"
    with lease(bucket, "two"):
        assert json.loads(server.objects[KEY].data)["owner"] == "two"


def test_it_is_renewed_and_not_lost(server: Server, bucket: Bucket) -> None:
    with lease(bucket, "one", life_s=0.6) as held:
        generation = server.objects[KEY].generation
        until(lambda: server.objects[KEY].generation >= generation + 5)
        until(lambda: not held.lost)  # a machine may stand still for longer than its life
        held.check()


@pytest.mark.parametrize("ours_ahead_s", [-1e6, 0.0, 1e6])
def test_a_holder_of_another_machine_is_outwaited_by_the_services_clock_alone(
    ours_ahead_s: float, server: Server, bucket: Bucket
) -> None:
    """Whatever the difference between the service's clock and ours."""
    server.ahead_s = ours_ahead_s
    bucket.put(
        "lease",
        json.dumps(
            {
                "owner": "one",
                "host": "far",
                "pid": 7,
                "life_s": 60,
                "machine": "another",
                "started": "1",
            }
        ).encode(),
    )
    server.ahead_s += 45
    with (
        pytest.raises(Failed, match=r"in use by one \(process 7 on far\), which said so 4\d s ago"),
        lease(bucket, "two"),
    ):
        pass
    server.ahead_s += 18
    with lease(bucket, "two") as held:
        assert json.loads(server.objects[KEY].data)["owner"] == "two"
        assert not held.lost


def test_one_may_wait_for_the_end_of_one_that_may_be_dead(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "MARGIN_S", 0.0)
    bucket.put(
        "lease",
        json.dumps(
            {"owner": "one", "host": "far", "pid": 7, "life_s": 1.0, "machine": "another"}
        ).encode(),
    )
    began = time.monotonic()
    with lease(bucket, "two", life_s=1.0, wait=True):
        assert 0.5 < time.monotonic() - began < 20
    with lease(bucket, "one", life_s=12.0):  # renewed after four seconds
        began = time.monotonic()
        with (
            pytest.raises(Failed, match="in use by one"),
            lease(bucket, "two", life_s=1.0, wait=True),
        ):
            pass
        assert time.monotonic() - began < 20


HOLDER = """
import sys, time
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.lease import lease
with lease(open_bucket("gs://bucket/runs/one"), "one", life_s=float(sys.argv[1])) as held:
    print("held", flush=True)
    for line in sys.stdin:
        lost = held.lost
        try:
            held.check()
            print(lost, flush=True)
            print("held", flush=True)
        except Exception as error:
            print(lost, flush=True)
            print(error, flush=True)
"""


def start(life_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(life_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def asked(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Whether the process knows that it lost the lease, and what a check says, if that fails."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline().strip(), process.stdout.readline().strip()


def test_a_killed_holder_of_this_machine_need_not_be_outwaited(
    server: Server, bucket: Bucket
) -> None:
    process = start(1000.0)
    with (
        pytest.raises(Failed, match=f"in use by one .process {process.pid} on"),
        lease(bucket, "two"),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with lease(bucket, "two") as held:
        held.check()


def test_a_holder_that_stood_still_learns_that_it_was_taken_over(
    server: Server, bucket: Bucket
) -> None:
    """And does not take away the lease of the other when it goes."""
    process = start(3.0)
    process.send_signal(signal.SIGSTOP)
    server.ahead_s += 10
    with lease(bucket, "two", life_s=30.0) as held:
        process.send_signal(signal.SIGCONT)
        lost, message, until_s = "False", "", time.monotonic() + PATIENCE_S
        while lost == "False" and time.monotonic() < until_s:
            time.sleep(0.2)
            lost, message = asked(process)
        process.communicate()
        assert lost == "True"
        assert message.startswith("gs://bucket/runs/one/lease was taken over by two (process ")
        held.check()
        assert not held.lost
    assert not server.objects


def test_it_counts_as_lost_when_nobody_can_be_asked_and_is_ours_again_when_nobody_took_it(
    server: Server, bucket: Bucket
) -> None:
    with lease(bucket, "one", life_s=0.6) as held:
        server.fault("insert", 100000, code=503)
        until(lambda: held.lost)
        server.faults.clear()
        until(lambda: not held.lost)
        held.check()


def test_a_renewal_whose_answer_is_lost_is_still_ours(server: Server, bucket: Bucket) -> None:
    with lease(bucket, "one", life_s=0.9) as held:
        server.fault(
            "insert", code=400, lose=True
        )  # given up: the holder knows an older generation than the service
        until(lambda: not server.faults["insert"])
        held.check()
        until(lambda: not held.lost)
    assert not server.objects


def test_a_holder_whose_renewal_replaces_what_is_read_is_told(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, missed = bucket.get, list[str]()

    def replaced_once(name: str) -> bytes:
        if not missed:
            missed.append(name)
            raise Missing(f"{name} was replaced")
        return get(name)

    with lease(open_bucket("gs://bucket/runs/one"), "run one"):
        monkeypatch.setattr(bucket, "get", replaced_once)
        with pytest.raises(Failed, match="in use by run one"), lease(bucket, "two"):
            pass
    assert missed == ["lease"]


def test_an_object_that_is_no_lease_is_respected(server: Server, bucket: Bucket) -> None:
    bucket.put("lease", b"not ours")
    with pytest.raises(Failed, match="in use by somebody"), lease(bucket, "two"):
        pass


def test_the_end_of_a_holder_leaves_the_lease_to_its_successor(
    server: Server, bucket: Bucket
) -> None:
    """It stood still, was taken over, and has not heard of it when it ends."""
    with lease(bucket, "one", life_s=600):
        bucket.put("lease", b'{"owner": "two"}', generation=server.objects[KEY].generation)
    assert json.loads(server.objects[KEY].data)["owner"] == "two"


def test_a_holder_is_outwaited_for_longer_than_it_is_sure_of_its_lease(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clocks may differ by the margin."""
    monkeypatch.setattr("ingot.base.remote.lease.MARGIN_S", 1000.0)
    about = {"owner": "one", "host": "far", "pid": 7, "life_s": 2000, "machine": "x"}
    bucket.put("lease", json.dumps({**about, "started": "1"}).encode())
    for ahead_s in (1500, 1000):
        server.ahead_s += ahead_s
        with pytest.raises(Failed, match="in use by one"), lease(bucket, "two"):
            pass
    server.ahead_s += 1000
    with lease(bucket, "two"):
        assert json.loads(server.objects[KEY].data)["owner"] == "two"


def test_a_lease_is_sure_from_the_question_on_and_not_from_the_answer(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service reckons from when it wrote it, which may be long before we hear of it."""
    put = type(bucket).put

    def slow(self: Bucket, *arguments: Any, **named: Any) -> Any:
        done = put(self, *arguments, **named)
        time.sleep(0.6)
        return done

    monkeypatch.setattr(type(bucket), "put", slow)
    with lease(bucket, "one", life_s=0.4) as held:
        assert held.lost
