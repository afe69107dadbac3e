"""Exact similarities and the clusters that follow, against the plainest way to find them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.cleaning.steps import clusters
from ingot.data.cleaning.steps.clusters import (
    ALONE,
    Candidates,
    cluster,
    read_components,
    roots,
    similarities,
    union,
    write_components,
)

SETS = st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=8), min_size=1, max_size=9)


def members(sets: list[set[int]]) -> Candidates:
    return Candidates(
        np.arange(len(sets)) * 10, [np.array(sorted(values), np.uint64) for values in sets]
    )


def plain_jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)


def plain_clusters(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """The smallest place that each is connected with."""
    found = list(range(count))
    for _ in range(count):
        for one, other in edges:
            found[one] = found[other] = min(found[one], found[other])
    return found


@given(SETS)
def test_similarities(sets: list[set[int]]) -> None:
    own = members(sets).sets
    assert similarities(own[0], own).tolist() == [plain_jaccard(sets[0], other) for other in sets]


def test_similarities_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    own = members([{1, 2, 3}, {2, 3}, {9}, {1, 2, 3}, {3, 4, 5, 6}]).sets
    whole = similarities(own[0], own)
    monkeypatch.setattr(clusters, "VALUES_AT_ONCE", 3)
    assert np.array_equal(similarities(own[0], own), whole)


@given(
    SETS,
    st.lists(st.sets(st.integers(0, 8), min_size=2), max_size=6),
    st.sampled_from([0.2, 0.5, 0.75, 1.0]),
)
def test_clusters(sets: list[set[int]], groups: list[set[int]], similarity: float) -> None:
    own = [sorted(place for place in group if place < len(sets)) for group in groups]
    edges = [
        pair
        for group in own
        for pair in itertools.combinations(group, 2)
        if plain_jaccard(sets[pair[0]], sets[pair[1]]) >= similarity
    ]
    found, bounded = cluster(
        members(sets), [np.array(group) for group in own if len(group) > 1], similarity
    )
    assert found.tolist() == plain_clusters(len(sets), edges)
    assert bounded == 0


def test_large_groups_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(4)
    sets = [set(chance.choices(range(14), k=8)) for _ in range(60)]
    groups = [np.arange(60), np.arange(0, 60, 2)]
    small, _ = cluster(members(sets), groups, 0.6)
    monkeypatch.setattr(clusters, "SMALL", 1000)
    assert np.array_equal(cluster(members(sets), groups, 0.6)[0], small)
    assert 1 < len(set(small.tolist())) < 60


def test_hostile_groups_cost_no_more_than_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counting(one: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
        nonlocal compared
        compared += len(others)
        return similarities(one, others)

    monkeypatch.setattr(clusters, "similarities", counting)
    monkeypatch.setattr(clusters, "LEADERS", 10)
    apart = members([{number, number + 1} for number in range(0, 4000, 2)])
    found, bounded = cluster(apart, [np.arange(2000)], 0.5)
    assert (found.tolist(), bounded) == (list(range(2000)), 1)
    assert compared <= 10 * 2000
    compared = 0
    alike = members([{1, 2, 3}] * 2000)
    found, _ = cluster(alike, [np.arange(2000)] * 5, 0.5)
    assert set(found.tolist()) == {0}
    assert compared == 1999, "what is in one cluster already is not compared again"


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=25), st.integers(1, 7))
def test_components(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[int, int]], at_once: int
) -> None:
    folder = tmp_path_factory.mktemp("components")
    runs = [np.array(edges[begin : begin + at_once]).T for begin in range(0, len(edges), at_once)]
    count = write_components(folder / "c.npy", 30, ((run[0], run[1]) for run in runs))
    touched = {node for edge in edges for node in edge}
    expected = [
        root if node in touched else ALONE for node, root in enumerate(plain_clusters(30, edges))
    ]
    assert read_components(folder / "c.npy").tolist() == expected
    assert count == len(touched)
    assert [path.name for path in folder.iterdir()] == ["c.npy"]


def test_a_long_chain(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(9_999)
    write_components(tmp_path / "c.npy", 10_000, [(order, order + 1)])
    assert set(read_components(tmp_path / "c.npy").tolist()) == {0}


class Counted(np.ndarray[Any, np.dtype[np.int64]]):
    """Parents that count how many of them are read."""

    read = 0

    def __getitem__(self, nodes: Any) -> Any:
        Counted.read += len(nodes)
        return super().__getitem__(nodes).view(np.ndarray)


def test_a_chain_in_order_is_not_walked_link_by_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """As successive versions of one document are; other orders have short paths by chance."""
    monkeypatch.setattr(Counted, "read", 0)
    links = np.tile(np.arange(2_000), 4)
    parents = np.arange(2_001).view(Counted)
    union(parents, links, links + 1)
    assert set(roots(parents, np.arange(2_001)).tolist()) == {0}
    assert Counted.read < 200 * len(links)
