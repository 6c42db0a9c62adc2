"""The demo: on the real engine as a newcomer runs it, and its verdict when something is wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="needs rich, for the demo's output")
pytest.importorskip("skimage", reason="needs scikit-image, for its photographs")
pytest.importorskip("vllm", reason="needs vLLM, which has no wheel for this Python")

from mmcollate.integrations import vllm as plugin
from rich.console import Console
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)

from demo import story, terminal
from demo.engine import Batch, Run, switch

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Importing vLLM takes three times as long when bytecode is not kept.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_demo_runs_and_says_what_it_checked() -> None:
    done = python("-m", "demo")
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout
    for line in (
        "Batch 1: modality image, 3 items",
        "Batch 2: modality video, 1 item",
        "Checked in this run, not just claimed",
        "  yes  The 2 batches that the engine got from mmcollate, 5 fields, are bit-identical",
        "  yes  The 4 outputs of the vision encoder",
        "  yes  The input matters",
        "Where to go next",
    ):
        assert line in done.stdout, done.stdout
    for row in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert f"│ {row} " in done.stdout, done.stdout
    assert done.stdout.count("Microseconds to make it: mmcollate ") == 2
    assert "FAILED" not in done.stdout
    assert "WARNING" not in done.stdout


def test_a_failure_shows_what_was_hidden(tmp_path: Path) -> None:
    program = f"""
import os, pathlib
from demo import __main__ as demo, story

def tell(console, start_engine):
    os.system("echo hidden noise")
    raise RuntimeError("planted")

story.tell = tell
demo.LOG = pathlib.Path({str(tmp_path / "demo.log")!r})
raise SystemExit(demo.main())
"""
    done = python("-c", program)
    assert done.returncode == 1, done.stdout
    assert "hidden noise" in done.stdout
    assert "RuntimeError: planted" in done.stdout


def test_the_progress_bar_lets_no_noise_through() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    with terminal.Steps(console, total=1) as steps, steps.step("work"):
        print("noise")
        print("noise", file=sys.stderr)
    assert "1. work" in console.file.getvalue()
    assert "noise" not in console.file.getvalue()


class FakeEngine:
    """Collates small items as the engine would; what the encoder gives is their pixels."""

    def __init__(self, spoil: Callable[[Run], Run] = lambda run: run) -> None:
        self._spoil = spoil
        self._runs = 0

    def run(self, requests: list[object], *, mmcollate_on: bool) -> Run:
        self._runs += 1
        mirrored = self._runs == 3
        items = [item(0), item(1), item(5 if mirrored else 2)]
        collate = (
            plugin.group_and_batch_mm_items
            if mmcollate_on
            else plugin.originals().group_and_batch_mm_items
        )
        options = {"device": torch.device("cpu"), "pin_memory": False}
        with torch.inference_mode():
            batch = Batch(items, options, list(collate(items, **options)))
        run = Run(
            made_by_mmcollate=int(mmcollate_on),
            encoder_outputs=[one["pixel_values"].data.float() for one in items],
            logprobs=[{7: -0.5, 8: -1.5}, {7: -0.75 if mirrored else -0.25}],
            batches=[batch],
        )
        return self._spoil(run) if self._runs == 2 else run


def item(value: int) -> MultiModalKwargsItem:
    pixels, grid = torch.full((4, 6), value), torch.tensor([1, 2, 2])
    return MultiModalKwargsItem(
        pixel_values=MultiModalFieldElem(pixels, MultiModalFlatField(slices=[])),
        image_grid_thw=MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
    )


def tell(engine: FakeEngine) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    code = story.tell(console, lambda: engine)
    return code, console.file.getvalue()


def test_the_verdict_is_zero_if_nothing_differs() -> None:
    code, text = tell(FakeEngine())
    assert code == 0, text
    assert "Batch 1: modality image, 3 items" in text
    assert "FAILED" not in text


def one_bit_of_the_batch(run: Run) -> Run:
    [(_, fields)] = run.batches[0].groups
    with torch.inference_mode():
        fields["pixel_values"] = fields["pixel_values"].clone()
        fields["pixel_values"][3, 5] ^= 1
    return run


def another_grouping(run: Run) -> Run:
    [(count, fields)] = run.batches[0].groups
    run.batches[0].groups[:] = [(count - 1, fields), (1, fields)]
    return run


def one_encoder_output(run: Run) -> Run:
    run.encoder_outputs[1][0, 0] += 1
    return run


def one_logprob(run: Run) -> Run:
    run.logprobs[0][7] += 1e-6
    return run


def mmcollate_was_not_on(run: Run) -> Run:
    return replace(run, made_by_mmcollate=0)


def no_batch(run: Run) -> Run:
    return replace(run, made_by_mmcollate=0, batches=[])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (one_bit_of_the_batch, "batch 1[0][1]['pixel_values']: the first of 1 bytes that differ"),
        (another_grouping, "batch 1: 2 elements, expected 1"),
        (one_encoder_output, "encoder outputs[1]: the first of "),
        (one_logprob, "the log-probabilities of the first tokens differ"),
        (mmcollate_was_not_on, "on: mmcollate made 0 of 1 batches"),
        (no_batch, "the engine asked for no batch"),
    ],
)
def test_a_planted_difference_fails_the_demo(spoil: Callable[[Run], Run], problem: str) -> None:
    code, text = tell(FakeEngine(spoil))
    assert code == 1
    assert "FAILED" in text
    assert problem in text


def test_an_input_that_does_not_matter_fails_the_demo() -> None:
    engine = FakeEngine()
    engine._runs = -1  # the mirrored run is never reached
    code, text = tell(engine)
    assert code == 1
    assert "the encoder's inputs [] changed, its outputs []" in text
    assert "one changed photograph changed no log-probability" in text


def test_an_input_that_changes_another_output_fails_the_demo() -> None:
    code, text = tell(FakeEngine(one_encoder_output))
    assert code == 1
    assert "the encoder's inputs [2] changed, its outputs [1, 2]" in text


def test_a_plugin_that_stays_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "activate", lambda: False)
    with pytest.raises(RuntimeError, match="can't be switched on"):
        switch(True)
