"""Rolls a version out to an endpoint without an outage: deploys it beside the old one, moves a
share of the traffic, then all of it, and undeploys the old one last.

At every moment the old or the new version serves. A lease in the bucket lets one command run at a
time. A command that was killed leaves its state in the endpoint; the next one gives the traffic
back to the live version and undeploys or reuses what gets none.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.lease import Lease, lease
from ingot.cloud.clients import EXISTS, GoogleClients, http_status_of
from ingot.cloud.vertex import endpoints
from ingot.cloud.vertex.endpoints import VertexEndpoint
from ingot.registry.vertexai.endpoint import (
    RolloutPlan,
    create_request,
    deploy_request,
    find_endpoint,
)
from ingot.registry.vertexai.probe import probe_endpoint

LEASE_S = 60.0
"""How long the lease of a killed command blocks the next one on another machine."""
ATTEMPTS, PAUSE_S = 5, 2.0
"""How often a failed change of the endpoint is tried, and the seconds between two tries."""
_OURS = ("ingot-verb", "deploy")
"""The label of endpoints that ingot created and may delete."""
_BUSY = "other operation"
"""Part of the error message while somebody else is changing the endpoint."""


def roll_out(
    google: GoogleClients,
    plan: RolloutPlan,
    live: Callable[[], int | None],
    allow: Callable[[int | None], None],
    commit: Callable[[], None],
) -> None:
    """Make `plan` serve all of the traffic. `live` returns the live version's number; `commit`
    makes the new version the live one once it serves.

    `allow` is called with the live version while the lease is held, before anything is changed, and
    raises if the rollout is no longer wanted.

    Raises:
        WrongInput: there are two endpoints of the name, the endpoint serves other models, or the
            service refuses machine, image or permissions.
        Failed: another command deploys this name, or the new version does not start or gives a
            wrong answer. The old one then keeps serving.
    """
    bucket = open_bucket(f"{google.bucket}/ingot/endpoints/{plan.name}")
    with lease(bucket, f"ingot deploy {plan.name}", life_s=LEASE_S, wait=True) as held:
        before = live()
        allow(before)
        _Rollout(google, plan, before, held).run(live, commit)


class _Rollout:
    """One run of `roll_out` while it holds the lease. `_stable` is the deployed model that serves
    until the new one does.
    """

    def __init__(
        self, google: GoogleClients, plan: RolloutPlan, live: int | None, held: Lease
    ) -> None:
        self._google, self._plan, self._live, self._held = google, plan, live, held
        self._name, self._created = "", False
        self._stable: str | None = None
        self._is_recovered = False  # whether `_recover` has decided what `_stable` is
        self._operation: str | None = None

    def run(self, live: Callable[[], int | None], commit: Callable[[], None]) -> None:
        endpoint, has_begun = find_endpoint(self._google, self._plan.name), False
        finish = (
            f"`ingot deploy {self._plan.name} --version {self._plan.version.number}` finishes it"
        )
        try:
            self._created = endpoint is None
            self._name = (
                endpoint.name
                if endpoint
                else endpoints.create(self._google, create_request(self._google, self._plan))
            )
            new = self._recover()
            if new is None:
                new = self._deploy()
            self._move_traffic(new)
            self._held.check()
            has_begun = True
            commit()
        except BaseException as error:
            if has_begun and self._is_live(
                live
            ):  # undoing would leave an endpoint that serves another version than the live one
                if isinstance(error, IngotError):
                    raise Failed(
                        f"{self._plan.called} serves all of the traffic, but {error}; {finish}"
                    ) from error
                raise
            self._undo(error)
            if isinstance(error, Failed | WrongInput) and self._name:
                undone = (
                    "nothing is deployed"
                    if self._is_recovered or self._created
                    else "nothing was changed"
                )
                state = "the version before serves on" if self._stable else undone
                raise type(error)(
                    f"{self._plan.called} is not deployed, {state}: {error}"
                ) from error
            raise
        try:
            self._keep_only(new)
        except IngotError as error:
            raise Failed(
                f"{self._plan.called} is live, but the one before could not be taken away: {error};"
                f" {finish}"
            ) from error

    def _is_live(self, live: Callable[[], int | None]) -> bool:
        """Whether the pointer moved before `commit` failed. True as well where it cannot be read,
        so that what serves now keeps serving.
        """
        try:
            return live() == self._plan.version.number
        except IngotError:
            return True

    def _recover(self) -> str | None:
        """Clean up after a killed command: afterwards one version serves all of the traffic, and at
        most the new one is deployed beside it.

        Returns the id of the new one if it is deployed already.
        """
        endpoint = self._settled()
        serving = [
            deployed
            for deployed in endpoint.deployed
            if endpoint.traffic.get(deployed.id) or deployed.number == self._live
        ]
        # The live version is preferred, then whichever serves most. Where nothing is live yet, the
        # new version does not count: it has not been verified.
        verified = [
            deployed
            for deployed in serving
            if self._live is not None or not self._plan.runs(deployed)
        ]
        best = max(
            verified,
            key=lambda deployed: (
                deployed.number == self._live,
                endpoint.traffic.get(deployed.id, 0),
                deployed.id,
            ),
            default=None,
        )
        self._stable, self._is_recovered = best.id if best else None, True
        if self._stable is not None:
            self._set_traffic({self._stable: 100})
        new = next(
            (
                deployed.id
                for deployed in sorted(endpoint.deployed, key=lambda one: one.id != self._stable)
                if self._plan.runs(deployed)
            ),
            None,
        )
        for deployed in endpoint.deployed:
            if deployed.id not in (self._stable, new):
                self._undeploy(deployed.id)
        return new

    def _deploy(self) -> str:
        """Deploy the new version without traffic. Its id is chosen here, so that it can be found
        even if the service's answer is lost.
        """
        own_id = str(random.SystemRandom().randrange(10**8, 10**9))
        request = deploy_request(self._google, self._plan, self._name, own_id)
        self._held.check()
        say(f"deploying {self._plan.called} beside what serves; this takes minutes")
        try:
            self._operation = endpoints.begin_deploy(self._google, request)
            endpoints.await_deploy(self._google, request, self._operation)
        except Failed:
            if own_id not in {deployed.id for deployed in self._settled().deployed}:
                raise
        self._operation = None
        return own_id

    def _move_traffic(self, new: str) -> None:
        """Give the new version a share of the traffic, check its answer, then give it all. Where
        nothing serves yet, it gets all at once.
        """
        share, check = self._plan.share, self._plan.check
        if new == self._stable:
            share = 100
        elif self._stable is None or share is None or share >= 100:
            share = 100
            self._set_traffic({new: 100})
        else:
            self._set_traffic({self._stable: 100 - share, new: share})
        if check is not None:
            say(f"{self._plan.called} has {share} % of the traffic; asking it")
            probe_endpoint(self._google, self._name, new, share, check)
        self._set_traffic({new: 100})

    def _undo(self, error: BaseException) -> None:
        """Give the traffic back to what served before, undeploy everything else, and delete an
        endpoint that this command created.
        """
        if not self._name:
            return
        try:
            if self._operation is not None and not isinstance(
                error, Exception
            ):  # stopped by a signal: cancel the deployment instead of waiting for it
                endpoints.cancel_deploy(self._google, self._operation)
            if self._stable is not None:
                self._keep_only(self._stable)
                return
            if self._is_recovered:
                for deployed in self._settled().deployed:
                    self._undeploy(deployed.id)
            elif not self._created:
                return  # nothing was changed yet
            endpoint = endpoints.get(self._google, self._name)
            if (
                (self._created or self._live is None)
                and _OURS in endpoint.labels.items()
                and not endpoint.deployed
            ):
                endpoints.delete(self._google, self._name)
        except IngotError as wrong:
            say(
                f"warning: {self._name} could not be put back ({wrong}); the next `ingot deploy"
                f" {self._plan.name}` does it"
            )

    def _keep_only(self, one: str) -> None:
        self._set_traffic({one: 100})
        for deployed in self._settled().deployed:
            if deployed.id != one:
                self._undeploy(deployed.id)

    def _settled(self) -> VertexEndpoint:
        """The endpoint, once its running operations have ended."""
        endpoints.wait_until_idle(self._google, self._name)
        return self._read()

    def _read(self) -> VertexEndpoint:
        """The endpoint, checked to serve only versions of this name. Read before each change,
        because others may use it.
        """
        endpoint = endpoints.get(self._google, self._name)
        self._plan.check_only_ours(endpoint)
        return endpoint

    def _set_traffic(self, traffic: dict[str, int]) -> None:
        def change() -> None:
            endpoint = self._read()
            if {key: share for key, share in endpoint.traffic.items() if share} != traffic:
                self._held.check()
                endpoints.set_traffic(self._google, endpoint, traffic)

        _retry(change)

    def _undeploy(self, deployed: str) -> None:
        def change() -> None:
            if deployed in {one.id for one in self._settled().deployed}:
                self._held.check()
                endpoints.undeploy(self._google, self._name, deployed)

        _retry(change)


def _retry(change: Callable[[], None]) -> None:
    """Call `change` again if its answer was lost or the endpoint changed meanwhile; `change` first
    reads whether anything is left to do.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            change()
            return
        except (Failed, WrongInput) as error:
            is_temporary = (
                isinstance(error, Failed)
                or http_status_of(error) in (EXISTS, 412)
                or _BUSY in str(error)
            )
            if not (left and is_temporary):
                raise
        time.sleep(PAUSE_S)
