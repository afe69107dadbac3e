"""The command line of vLLM on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ingot.base.hostmemory import HostMemory
from ingot.config.sections.deployment import Serve
from ingot.models.device import accelerator
from ingot.models.hf.compressed import Scheme
from ingot.serve.engines import vllm
from tests.serve.tiny import make_folder


@pytest.mark.skipif(accelerator() is not None, reason="a GPU decides otherwise")
@pytest.mark.parametrize(
    ("scheme", "amx", "dtype"),
    [
        (None, True, "float32"),
        (Scheme(4, 64), False, "bfloat16"),
        (Scheme(8, None), True, "float32"),
        (Scheme(8, None, integer_inputs=True), False, "float32"),
        (Scheme(8, None, integer_inputs=True), True, "bfloat16"),
    ],
)
def test_vllm_computes_in_float32_where_it_can(
    scheme: Scheme | None,
    amx: bool,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "scheme_of", lambda *_: scheme)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    folder = make_folder(tmp_path / "model")

    def given(**knobs: str) -> str:
        settings = Serve.model_validate(knobs)
        argv = vllm.vllm_command("python", folder, settings, "model", "127.0.0.1", 1, None).argv
        return argv[argv.index("--dtype") + 1]

    assert given() == dtype
    assert given(compute="bf16") == "bfloat16"
    assert given(compute="fp32") == "float32"


def test_vllm_is_started_where_no_file_of_mine_takes_the_place_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by a variable: its interpreter may be too old for an option."""
    folder = make_folder(tmp_path / "model")
    (tmp_path / "this.py").write_text("print('a file of mine')")
    monkeypatch.chdir(tmp_path)
    made = vllm.vllm_command(sys.executable, folder, Serve(), "model", "127.0.0.1", 1, None)
    run = [made.argv[0], "-m", "this"]
    assert subprocess.check_output(run, text=True) == "a file of mine\n"
    environment = {**os.environ, **made.environment}
    assert "Zen" in subprocess.check_output(run, env=environment, text=True)


@pytest.mark.parametrize(
    ("free", "wanted"), [(6 << 30, 6 << 28), (1 << 20, 1 << 28), (1 << 40, 4 << 30)]
)
def test_the_cache_of_a_cpu_is_a_quarter_of_what_a_container_has_free(
    free: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "host_memory", lambda: HostMemory(0, free))
    assert vllm.kv_cache_bytes() == wanted
