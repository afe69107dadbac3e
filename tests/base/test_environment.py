from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ingot.base.environment import (
    Ranks,
    holds_secret,
    install_command,
    ranks,
    read_dotenv,
    secret,
    threads_asked_for,
    usable_cores,
)
from ingot.base.errors import WrongInput
from tests.base.groups import V2, machine


def test_ranks_are_read_from_torchruns_variables() -> None:
    assert ranks({}) == Ranks(0, 1, 0, 1)
    assert ranks({}).is_main
    read = ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert read == Ranks(5, 8, 1, 4)
    assert not read.is_main
    with pytest.raises(WrongInput, match=r"must be integers.*torchrun"):
        ranks({"RANK": "first"})


def test_a_rank_that_its_job_has_not_is_refused() -> None:
    """As where a shell kept RANK alone: all would be done in silence and without a record."""
    for variables in ({"RANK": "1"}, {"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "-1"}):
        with pytest.raises(WrongInput, match=r"is no rank of WORLD_SIZE=.*; start.*unset RANK"):
            ranks(variables)
    with pytest.raises(WrongInput, match=r"^LOCAL_RANK=0 is set and RANK is not.*; start.*unset"):
        ranks({"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("given", "threads"),
    [("4", 4), (" 4 ", 4), ("4,2", 4), ("", None), ("0", None), ("-2", None), ("all", None)],
)
def test_threads_are_asked_for_as_openmp_reads_it(
    given: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_asked_for() == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_asked_for() is None


@pytest.mark.parametrize(("system", "told"), [("linux", "apt install a"), ("darwin", "brew")])
def test_each_system_has_a_tool_of_its_own_to_install_with(
    system: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert install_command("a", "b").startswith(told)


@pytest.mark.parametrize(
    ("job", "above", "wanted"),
    [
        ("max 100000", "max 100000", 8),
        ("300000 100000", "max 100000", 3),
        ("250000 100000", "400000 100000", 3),
        ("400000 100000", "50000 100000", 1),
        ("1600000 100000", "max 100000", 8),
    ],
)
def test_cores_are_those_whose_time_a_job_is_given(
    job: str, above: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    files = {"a/job/cpu.max": job, "a/cpu.max": above}
    assert usable_cores(machine(tmp_path / "v2", "0::/a/job", V2, files)) == wanted
    quotas = {"a/job": job.replace("max", "-1"), "a": above.replace("max", "-1")}
    files = {
        f"cpu/{group}/cpu.cfs_{name}_us": number
        for group, told in quotas.items()
        for name, number in zip(("quota", "period"), told.split(), strict=True)
    }
    mount = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    assert usable_cores(machine(tmp_path / "v1", "1:cpu:/a/job", mount, files)) == wanted


def test_a_dotenv_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("""\ufeffFIRST=1
# a comment
PLAIN=one two
export EXPORTED=3
QUOTED="with # hash"
SINGLE='it''s'
EMPTY=
COMMENTED=value # not this
BOTH="with # hash"  # not "this"
NOTHING= # to say
HASHES=####
a-b.C=names of others
ESCAPED="say \\"hi\\" # C:\\\\dir \\d"
OPEN="as it is
  SPACED = around
URL=https://host/?a=b
TOKEN=hf_a#b#c
TAGGED=one#two # three
""")
    assert read_dotenv(path, "") == {
        "FIRST": "1",
        "PLAIN": "one two",
        "EXPORTED": "3",
        "QUOTED": "with # hash",
        "SINGLE": "it''s",
        "EMPTY": "",
        "COMMENTED": "value",
        "BOTH": "with # hash",
        "NOTHING": "",
        "HASHES": "####",
        "a-b.C": "names of others",
        "ESCAPED": 'say "hi" # C:\\dir \\d',
        "OPEN": '"as it is',
        "SPACED": "around",
        "URL": "https://host/?a=b",
        "TOKEN": "hf_a#b#c",
        "TAGGED": "one#two",
    }


def test_quotes_of_a_dotenv_file_go_over_lines_but_never_over_a_setting(tmp_path: Path) -> None:
    """An apostrophe of another's must not take the settings up to the next one with it."""
    path = tmp_path / ".env"
    path.write_text("""\
INGOT_KEY="-----BEGIN \\"KEY\\"-----
AbC=
INSIDE=it
-----END KEY-----" # over several lines
OTHERS='set INGOT_A 1
'
GREETING="hello
INGOT_TRAIN__STEPS=7
BYE="
MESSAGE='it
export INGOT_SEED=3
'
""")
    assert read_dotenv(path, "INGOT_") == {
        "INGOT_KEY": '-----BEGIN "KEY"-----\nAbC=\nINSIDE=it\n-----END KEY-----',
        "INGOT_TRAIN__STEPS": "7",
        "INGOT_SEED": "3",
    }


@pytest.mark.parametrize(
    "line",
    [
        "INGOT_KEY hf_secret",
        "export INGOT_A B=hf_secret",
        "INGOT_KEY",
        "INGOT_KEY: hf_secret",
        "set INGOT_KEY=hf_secret",
        "setenv INGOT_KEY hf_secret",
        "declare -x INGOT_KEY=hf_secret",
        '"INGOT_KEY"=hf_secret',
        "- INGOT_KEY=hf_secret",
        "$env:INGOT_KEY=hf_secret",
    ],
)
def test_a_setting_that_is_no_assignment_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / ".env"
    path.write_text(f"OK=1\nINGOT_KEY=x\n{line}\n")
    with pytest.raises(WrongInput) as error:
        read_dotenv(path, "INGOT_")
    assert str(error.value) == f"{path}:3: the line is not NAME=value; mend or remove it"


@pytest.mark.parametrize(
    "line",
    [
        "hf_secret",
        "KEY: hf_secret",
        "=value",
        "source other.env",
        "set KEY=INGOT_KEY",
        "NO_INGOT_KEY hf_secret",
        "# set INGOT_KEY=hf_secret",
        "source other.env # not INGOT_KEY",
    ],
)
def test_what_is_for_others_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / ".env"
    path.write_text(f"OK=1\n{line}\nINGOT_SEED=3\n")
    assert read_dotenv(path, "INGOT_") == {"INGOT_SEED": "3"}


def test_a_dotenv_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_bytes(b"A=\xff")
    with pytest.raises(WrongInput, match=r"\.env is not UTF-8 \(byte 2\)"):
        read_dotenv(path, "")


def test_a_secret_is_a_reference_and_its_value_never_stands_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "value")
    assert secret("env:MY_KEY", "serve.api_key") == "value"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(
        WrongInput, match=r"serve\.api_key refers to env:MY_KEY, but \$MY_KEY is not set; export"
    ):
        secret("env:MY_KEY", "serve.api_key")
    with pytest.raises(WrongInput) as error:
        secret("sk-very-secret", "serve.api_key")
    assert "very-secret" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TOKEN")),
        *((name, True) for name in ("DB_PASSWORD", "gh_pat", "SLURM_JWT", "COMET_APIKEY")),
        *((name, True) for name in ("PGPASSWORD", "MYSQL_PWD", "KAGGLE_KEY", "SECRET_2")),
        *((name, True) for name in ("AZURE_STORAGE_CONNECTION_STRING", "X-Api-Key", "hf_token")),
        *((name, False) for name in ("PWD", "OLDPWD", "text_key", "eos_token", "max_tokens")),
        *((name, False) for name in ("experts_per_token", "flops_per_token")),
        *((name, False) for name in ("HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "PATH", "KEYMAP")),
        *((name, False) for name in ("GOOGLE_APPLICATION_CREDENTIALS", "MONKEY", "CACHE_KEY_DIR")),
    ],
)
def test_a_secret_is_told_by_the_name_of_its_variable(name: str, secret: bool) -> None:
    assert holds_secret(name) == secret
