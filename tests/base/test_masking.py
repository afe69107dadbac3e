"""What others may not read of an address of data."""

from __future__ import annotations

import pytest

from ingot.base.masking import MASK, keys_hidden, masked


@pytest.mark.parametrize("before", ["?", "?part=1&", "#", "?part=1;", "#part=1&"])
def test_a_key_is_hidden_wherever_it_stands_in_an_address(before: str) -> None:
    address = f"https://host/data.jsonl{before}"
    assert masked(f"{address}token=a1b2&n=3") == f"{address}token={MASK}&n=3"


def test_what_is_no_key_stays() -> None:
    text = "source: https://host/data.jsonl?part=1#rows"
    assert masked(text) == text


def test_a_record_keeps_a_mark_by_which_another_key_differs() -> None:
    address = "https://me:pa55@host/a.jsonl?part=1&X-Goog-Credential=c1&X-Amz-Signature="
    hidden = keys_hidden({"knobs": [{"source": f"{address}one"}], f"{address}one": 3})
    told = str(hidden)
    assert not any(secret in told for secret in ("pa55", "c1", "one"))
    assert "part=1&X-Goog-Credential=(hidden:" in told
    assert hidden == keys_hidden({"knobs": ({"source": f"{address}one"},), f"{address}one": 3})
    assert hidden["knobs"] != keys_hidden([{"source": f"{address}two"}])
    assert keys_hidden(hidden) == hidden, "what was hidden before stays"
    assert masked(hidden["knobs"][0]["source"]) == masked(f"{address}one")
    assert keys_hidden("https://host/a.jsonl?part=2#rows") == "https://host/a.jsonl?part=2#rows"
