"""The engine in processes of its own, where only vLLM's plugin mechanism brings mmcollate.

On a CPU there are three: the frontend, the engine's core, and the worker that runs the encoder.
"""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.engine.process import active_in, run

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM, which has no wheel for this Python"
    ),
    pytest.mark.timeout(500),
]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run_engine(tmp_path_factory)


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run_engine(tmp_path_factory, {"MMCOLLATE_DISABLE": "1"})


def run_engine(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str] | None = None
) -> Report:
    folder = tmp_path_factory.mktemp("engine")
    out, log = folder / "report.json", folder / "log"
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to look into the engine's process
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    run(
        "tests.engine.driver",
        *["qwen25vl", "--as-loaded", "--saved-weights", "--out", str(out)],
        log=log,
        environment=settings | (environment or {}),
    )
    report: Report = json.loads(out.read_text()) | {"log": log.read_text()}
    return report


def outputs(report: Report, inputs: str) -> list[str]:
    return [o for call in report["runs"][inputs]["calls"] for o in call["outputs"]]


def test_the_worker_collates_with_the_core(on: Report) -> None:
    for seen in on["runs"].values():
        assert seen["plugin"]["pid"] != on["frontend"]["pid"]
        assert seen["plugin"]["active"], seen["plugin"]["status"]
        fields = dict(seen["plugin"]["stats"]["fields"])
        fields.pop("reference", None)
        assert sum(fields.values()) > 0


def test_the_frontend_has_the_plugin(on: Report, off: Report) -> None:
    assert on["frontend"]["active"], on["frontend"]["status"]
    assert not off["frontend"]["active"]


def test_the_log_says_so(on: Report, off: Report) -> None:
    assert active_in(on["log"]) >= {"EngineCore", "VllmWorker"}
    assert not active_in(off["log"])


def test_disabling_it_by_the_environment(off: Report) -> None:
    for seen in off["runs"].values():
        assert seen["plugin"]["pid"] != off["frontend"]["pid"]
        assert not seen["plugin"]["active"]
        assert seen["plugin"]["stats"]["batches"] == 0


@pytest.mark.parametrize("inputs", ["A", "B"])
def test_on_and_off_are_the_same(on: Report, off: Report, inputs: str) -> None:
    assert on["runs"][inputs]["calls"] == off["runs"][inputs]["calls"]
    assert on["runs"][inputs]["requests"] == off["runs"][inputs]["requests"]


def test_every_item_matters(on: Report) -> None:
    """Guards the comparison: with other inputs, everything that is compared is different."""
    assert outputs(on, "A")
    assert not {*outputs(on, "A")} & {*outputs(on, "B")}
    pairs = zip(on["runs"]["A"]["requests"], on["runs"]["B"]["requests"], strict=True)
    assert all(a["first_logprobs"] != b["first_logprobs"] for a, b in pairs)
