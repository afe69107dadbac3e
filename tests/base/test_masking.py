"""What others may not read of a recipe, and of an address of data."""

from __future__ import annotations

import pytest

from ingot.base.masking import MASK, keys_hidden, knobs_hidden, masked
from ingot.config.documents import value_of
from ingot.config.knobs import knobs


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


def test_a_record_of_knobs_keeps_a_mark_of_what_is_under_the_name_of_a_secret() -> None:
    given = {"api_key": "s3cr3t", "headers": {"Authorization": ["s3cr3t"]}, "password": 12345678}
    kept = {"max_tokens": 4, "experts_per_token": 8, "token": "env:TOKEN", "secret": None}
    hidden = knobs_hidden({"rewards": ({"arguments": given | kept},)})
    assert "s3cr3t" not in str(hidden)
    assert "12345678" not in str(hidden)
    (reward,) = hidden["rewards"]
    assert {name: reward["arguments"][name] for name in kept} == kept
    assert knobs_hidden(hidden) == hidden, "what was hidden before stays"
    for name, other in {"api_key": "s3cr3u", "password": 12345679}.items():
        changed = knobs_hidden({"rewards": [{"arguments": given | kept | {name: other}}]})
        assert changed != hidden
    assert masked(hidden) == masked({"rewards": [{"arguments": given | kept}]})


@pytest.mark.parametrize("login", ["me:a@b", "me:a@b@c", "m'e:pa\"ss", "a@b"])
def test_a_login_ends_at_the_last_sign_of_it(login: str) -> None:
    """As clients read it: a password may hold the sign."""
    assert masked(f"https://{login}@host:80/x") == f"https://{MASK}@host:80/x"
    assert keys_hidden(f"https://{login}@host/x").endswith(")@host/x")
    for other in ("https://host/x@y", "https://host?by=a@b", "https://host#a@b"):
        assert masked(other) == keys_hidden(other) == other


@pytest.mark.parametrize("name", ["pwd", "pw", "pass", "jwt", "sas", "sig", "userpassword"])
def test_a_key_of_an_address_is_hidden_whole(name: str) -> None:
    assert masked(f"https://host/x?n=1&{name}=a}},]b'c&compass=4") == (
        f"https://host/x?n=1&{name}={MASK}&compass=4"
    )


def test_a_secret_is_hidden_however_it_is_written() -> None:
    written = """
    api_key: a,MARK}
    password: ~MARK
    secret: nullMARK
    my_token:
    - MARK
    - {of: MARK}
    hf_token: |
      MARK
      MARK
    headers: {Authorization: Bearer MARK, X-Api-Key: MARK}
    environment: {GITHUB_PAT: MARK, SLURM_JWT: MARK, PGPASSWORD: "MARK, MARK", OPENAI_KEY: MARK}
    credentials: 12345678
    """
    shown = masked(value_of(written))
    assert "MARK" not in str(shown)
    assert "12345678" not in str(shown)
    kept = {"api_key": "env:A", "password": None, "hf_token": "secret:A", "token": True}
    kept |= {"eos_token": "<|end|>", "max_tokens": 4, "text_key": "text", "key_variable": "KEY"}
    assert masked(kept) == kept


def test_what_a_recipe_says_is_shown_but_for_its_secrets() -> None:
    named = {part for knob in knobs() for part in knob.plain.split(".")}
    hidden = {name for name in named if masked({name: "told"}) != {name: "told"}}
    assert hidden == {"api_key"}
