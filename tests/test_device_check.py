"""The script for a machine with a device runs without one, so that it can't rot."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmcollate import reference

SCRIPT = Path(__file__).resolve().parents[1] / "benches" / "device_check.py"


def test_all_checks_pass_on_the_fake_device(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, SCRIPT, "--fake", "--quick", "--json", figures]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(figures.read_text())
    assert {check["verdict"] for check in report["checks"].values()} == {"ok"}
    assert report["checks"]["copies"]["8 ragged images"] == {"mmcollate": 2, "reference": 8}
    assert report["times"].keys() == report["checks"]["copies"].keys() - {"verdict", "seconds"}


def load() -> object:
    spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wrong_byte_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    check = load()
    rig = check.FakeRig()  # type: ignore[attr-defined]
    right = rig.fake.copy

    def wrong(target: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> None:
        right(target, source, blocking=blocking)
        rig.fake.stream.launch(lambda: target[-1:].add_(1))

    monkeypatch.setattr(rig.fake, "copy", wrong)
    with pytest.raises(AssertionError, match="other bits"):
        check.parity(rig, True)  # type: ignore[attr-defined]


def test_vllms_own_functions_run_from_its_files_alone(tmp_path: Path) -> None:
    vllm = pytest.importorskip("vllm", reason="needs vLLM")
    root = Path(vllm.__file__).parent
    for file in ("multimodal/inputs.py", "multimodal/utils.py", "utils/jsontree.py"):
        (tmp_path / Path(file).name).write_text((root / file).read_text())
    check = load()
    arm = check.vllm_arm(tmp_path)  # type: ignore[attr-defined]
    for make in check.WORKLOADS.values():  # type: ignore[attr-defined]
        items, fields = make()
        # On the host, pinning is off.
        check.same(  # type: ignore[attr-defined]
            arm(items, fields, "cpu"), reference.collate(items, fields), "vLLM"
        )
    assert check.vllm_arm(tmp_path / "nowhere") is None  # type: ignore[attr-defined]
