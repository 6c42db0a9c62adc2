"""A real engine per model, all in one process: the same with mmcollate on and off.

Each case loads one engine, which takes the same requests with mmcollate switched off and on. Kept
are hashes of all that reaches the vision or audio encoder and of all that it returns, and the
answers with their logprobs; see `tests/engine/driver.py`.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.engine.cases import CASES
from tests.engine.forks import Engines
from tests.tiny_models import CACHE

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM, which has no wheel for this Python"
    ),
    pytest.mark.timeout(400),
]

Report = dict[str, Any]
Run = dict[str, Any]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines.started(tmp_path_factory.mktemp("engines") / "log") as engines:
        yield engines


@pytest.fixture(scope="module", params=sorted(CASES))
def report(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Report:
    out = CACHE / "engine" / f"{request.param}.json"
    log = tmp_path_factory.mktemp(request.param) / "log"
    engines.run(request.param, "--out", str(out), log=log)
    report: Report = json.loads(out.read_text())
    return report


def outputs(run: Run) -> list[str]:
    """The encoder's output for every item."""
    return [output for call in run["calls"] for output in call["outputs"]]


def assert_same(left: Run, right: Run) -> None:
    assert left["calls"] == right["calls"]
    assert left["requests"] == right["requests"]


def test_vllm_activates_the_plugin_by_itself(report: Report) -> None:
    assert report["frontend"]["active"], report["frontend"]["status"]


def test_the_arms_are_what_they_say(report: Report) -> None:
    """Guards the comparison: no batch goes through mmcollate when off, every one when on."""
    for inputs in ("A", "B"):
        off, on = (report["runs"][f"{inputs} {arm}"] for arm in ("off", "on"))
        assert not off["plugin"]["active"]
        assert off["plugin"]["stats"]["batches"] == 0
        assert on["plugin"]["active"]
        # More than the encoder's where the processor collates too.
        assert on["plugin"]["stats"]["batches"] >= len(on["calls"])
        assert on["plugin"]["stats"]["items"] >= len(outputs(on))


def test_the_core_takes_every_field(report: Report) -> None:
    """Guards the comparison, which would hold for the reference alone as well."""
    for name in ("A on", "B on"):
        stats = report["runs"][name]["plugin"]["stats"]
        assert stats["reference_reasons"] == {}
        assert stats["fields"]["reference"] == 0
        assert sum(stats["fields"].values()) > 0


@pytest.mark.parametrize("inputs", ["A", "B"])
def test_on_and_off_are_the_same(report: Report, inputs: str) -> None:
    off, on = (report["runs"][f"{inputs} {arm}"] for arm in ("off", "on"))
    assert_same(off, on)


@pytest.mark.parametrize("arm", ["off", "on"])
def test_every_item_matters(report: Report, arm: str) -> None:
    """Guards the comparison: with other inputs, everything that is compared is different."""
    a, b = (report["runs"][f"{inputs} {arm}"] for inputs in ("A", "B"))
    assert len(outputs(a)) == len(outputs(b)) >= len(a["requests"])
    assert len({*outputs(a), *outputs(b)}) == len(outputs(a)) + len(outputs(b))
    for left, right in zip(a["requests"], b["requests"], strict=True):
        assert left["prompt"] == right["prompt"]
        assert left["first_logprobs"] != right["first_logprobs"]


def test_one_flipped_byte_shows(report: Report) -> None:
    """A byte flipped in what mmcollate returned changes the output of exactly one item.

    The same can be seen with a fault in the core itself: flip one byte after the copy in
    `rust/src/gather.rs`, and `test_on_and_off_are_the_same` fails.
    """
    off, faulty = report["runs"]["A off"], report["runs"]["A fault"]
    with pytest.raises(AssertionError):
        assert_same(off, faulty)
    changed = [a != b for a, b in zip(outputs(off), outputs(faulty), strict=True)]
    assert sum(changed) == 1
