"""What others may not read of an address of data."""

from __future__ import annotations

import pytest

from ingot.base.masking import MASK, masked


@pytest.mark.parametrize("before", ["?", "?part=1&", "#", "?part=1;", "#part=1&"])
def test_a_key_is_hidden_wherever_it_stands_in_an_address(before: str) -> None:
    address = f"https://host/data.jsonl{before}"
    assert masked(f"{address}token=a1b2&n=3") == f"{address}token={MASK}&n=3"


def test_what_is_no_key_stays() -> None:
    text = "source: https://host/data.jsonl?part=1#rows"
    assert masked(text) == text
