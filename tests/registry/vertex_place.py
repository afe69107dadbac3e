"""A project on loopback: Google's services and its object storage, with what recipes and models the
tests of the registry need.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ingot.base.reports import VerbOutcome
from ingot.cloud import clients
from ingot.cloud.vertex import jobs as operations
from ingot.config.recipe import Recipe
from ingot.registry.deploy import DeployRequest, deploy
from ingot.registry.verbs import gate, register
from ingot.registry.vertexai import probe as verification
from ingot.registry.vertexai import rollout as endpoint
from ingot.registry.vertexai.registry import VertexRegistry
from tests import gcs
from tests.fakes import vertex_models
from tests.fakes.google import Server
from tests.registry.models import a_recipe, trained

IMAGE = "us-central1-docker.pkg.dev/proj/repo/ingot-serve:latest"


@dataclass
class Place:
    """`google` and `storage` are the servers; `state` is what there is in the project."""

    root: Path
    google: Server
    storage: gcs.Server
    state: vertex_models.State

    def recipe(self, name: str = "run", **sections: Any) -> Recipe:
        cloud = {
            "project": "proj",
            "bucket": "bucket",
            "endpoint": self.google.address,
            "images": {"serve": IMAGE},
            **sections.pop("cloud", {}),
        }
        return a_recipe(
            self.root,
            name,
            **{"registry": {"name": "words", "kind": "vertex"}, "cloud": cloud, **sections},
        )

    def registered(
        self, name: str, model: str, value: float = 2.5, **sections: Any
    ) -> tuple[Recipe, VerbOutcome]:
        """A run that trained `model`, went through the gate and registered it."""
        recipe = trained(self.recipe(name, **sections), model, value)
        gate(recipe)
        return recipe, register(recipe)

    def registry(self) -> VertexRegistry:
        return VertexRegistry(self.recipe())

    def live(self) -> int | None:
        found = self.registry().live("words")
        return None if found is None else found.number

    def deploy(self, number: int | None = None, recipe: Recipe | None = None, **wishes: Any) -> int:
        return deploy(recipe or self.recipe(), "words", DeployRequest(number, **wishes)).number

    def is_whole(self, number: int) -> None:
        """Version `number` serves everything, is live by pointer and alias, nothing else is
        deployed, nothing runs, and nothing was amiss.
        """
        (deployed,) = self.state.endpoint.deployed_models
        assert int(deployed.model_version_id) == number
        assert dict(self.state.endpoint.traffic_split) == {deployed.id: 100}
        assert self.live() == number
        assert self.state.alias("ingot-words", "live") == number
        self.is_quiet()

    def is_quiet(self, *, served: bool = True) -> None:
        """Nothing runs and nobody holds anything; `served`: and there was no gap."""
        assert all(operation.message.done for operation in self.google.operations.values())
        assert not [name for name in self.storage.objects if "lease" in name or "/locks/" in name]
        for name in self.state.served if served else ():
            assert not self.state.gaps(name)


@contextlib.contextmanager
def opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for module, name, value in (
        (operations, "POLL_S", 0.005),
        (endpoint, "PAUSE_S", 0.005),
        (endpoint, "LEASE_S", 3.0),
        (verification, "SPREAD_S", 0.5),
        (verification, "PAUSE_S", 0.005),
        (clients, "FIRST_WAIT_S", 0.005),
        (clients, "PATIENCE_S", 2.0),
    ):
        monkeypatch.setattr(module, name, value)
    with gcs.serving(monkeypatch) as storage:
        google = Server()
        state = vertex_models.install(google)
        state.objects = lambda: [f"bucket/{name}" for name in storage.objects]
        try:
            yield Place(root, google, storage, state)
        finally:
            google.server_close()


def killed_at(place: Place, number: int, act: Callable[[], Any]) -> bool:
    """Do `act` in a child that is killed right after Google's services or its storage did what call
    `number` asked (from 1), before it is told.

    False when it came to its end before.
    """
    clients._client.cache_clear()  # connections must not be shared with the child
    seen, child = 0, 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(child, signal.SIGKILL)

    with _counted(place, count):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                act()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


@contextlib.contextmanager
def _counted(place: Place, count: Callable[[], None]) -> Iterator[None]:
    """`count` is called after each call that changes or shows something, before its answer is
    sent.
    """
    handlers, write = dict(place.google.handlers), place.storage.write

    def after(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(request: Any) -> Any:
            try:
                return handler(request)
            finally:
                count()

        return counted

    def written(name: str, *rest: Any) -> Any:
        made = write(name, *rest)
        if "lease" not in name and "/locks/" not in name:  # those are renewed by the clock
            count()
        return made

    place.google.handlers.update({name: after(handler) for name, handler in handlers.items()})
    place.storage.write = written  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        place.google.handlers.update(handlers)
        place.storage.write = write  # type: ignore[method-assign]
