"""The engine's benchmark runs, compares tokens, and fails where they or its arms are not right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM, which has no wheel for this Python"
    ),
    pytest.mark.timeout(200),
]

ROOT = Path(__file__).resolve().parents[1]


def test_a_quick_run_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benches.engine", "--quick", "--json", str(out)],
        cwd=ROOT,
        # Importing vLLM takes three times as long when bytecode is not kept.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    report = json.loads(out.read_text())
    assert {"mmcollate", "torch", "vllm", "machine", "cpu", "threads", "cases"} <= report.keys()
    [(name, case)] = report["cases"].items()
    assert f"| {name} |" in done.stdout
    assert (case["requests"], case["images"]) == (1, 1)
    # Two rounds of each of the two loops; an image alone is 64 tokens.
    assert case["tokens_compared"] > 4 * 64
    assert f"{case['tokens_compared']} tokens of each arm were compared" in done.stdout
    assert list(case["parts"]) == [
        "preprocessing, server",
        "preprocessing, offline",
        "engine steps",
        "whole run",
    ]
    for part in case["parts"].values():
        assert part["rounds"] == 2
        assert part["ms"].keys() == {"vllm", "again", "mmcollate"}
        quartiles = [*part["ms"].values(), part["speedup"], part["a_a"]]
        assert all(0 < low <= middle <= high for low, middle, high in quartiles)
    # Qwen2.5-VL collates in the worker alone, and one item is no copy.
    for arm in ("vllm", "mmcollate"):
        calls = {part: f["collation"][arm]["calls"] for part, f in case["parts"].items()}
        assert calls == dict(zip(case["parts"], (0, 0, 1, 1), strict=True))
        assert case["parts"]["engine steps"]["collation"][arm]["copied_bytes"] == 0


def samples_of(tokens: dict[str, list[int]]) -> Any:
    """A stand-in for the engine: its tokens by arm, and one batch where mmcollate is on."""
    import mmcollate
    from mmcollate.integrations import vllm as plugin

    from benches.engine_run import PARTS, Sample, Side

    def run(requests: list[Any], *, count_bytes: bool = False) -> Sample:
        arm = "mmcollate" if plugin.is_active() else "vllm"
        if arm == "mmcollate" and tokens.get("made", [1]) == [1]:
            mmcollate.collate([{"x": torch.ones(1)}], {"x": mmcollate.Flat()})
        return Sample({PARTS[0]: 1.0}, Side(calls=1), Side(), [tokens[arm]])

    return run


def run_rounds(tokens: dict[str, list[int]]) -> None:
    from mmcollate.integrations import vllm as plugin

    from benches.engine_cases import CASES
    from benches.engine_run import rounds_of

    case = CASES["Qwen2.5-VL, text only"]
    try:
        samples, _ = rounds_of(samples_of(tokens), case, rounds=2, seconds=0)
    finally:
        plugin.deactivate()
    assert {arm: len(of) for arm, of in samples.items()} == dict.fromkeys(samples, 2)


def test_equal_tokens_pass() -> None:
    run_rounds({"vllm": [1, 2], "mmcollate": [1, 2]})


def test_another_token_fails_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="the tokens differ between vllm and mmcollate"):
        run_rounds({"vllm": [1, 2], "mmcollate": [1, 3]})


def test_an_arm_that_is_not_what_it_says_fails() -> None:
    with pytest.raises(AssertionError, match="mmcollate: 0 of 1 batches"):
        run_rounds({"vllm": [1], "mmcollate": [1], "made": [0]})


def test_only_bytes_that_are_not_the_items_are_counted_as_copied() -> None:
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalFlatField

    from benches.engine_run import copied_bytes

    field = MultiModalFlatField(slices=[])
    whole = torch.from_numpy(np.zeros((4, 8), dtype=np.float32))
    items = [{"x": MultiModalFieldElem(part, field)} for part in whole.split(2)]
    assert copied_bytes(items, {"x": whole}) == 0
    assert copied_bytes(items, {"x": [whole[:2], whole[2:]]}) == 0
    assert copied_bytes(items, {"x": whole.clone()}) == whole.nbytes
