"""Requests that the real engine resumes after a prefix-cache hit: on and off are the same.

The second request of each conversation begins as the first did. Its first image is covered by the
prefix cache, so that the engine strips its payload and encodes the second image alone; see
`tests/engine/cache.py`. Qwen2.5-VL has M-RoPE, so that the covered image keeps its grid; there are
two conversations, the second about embeddings instead of images. LLaVA-NeXT keeps nothing.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.process import run

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM, which has no wheel for this Python"
    ),
    pytest.mark.timeout(400),
]

Turn = dict[str, Any]
Report = dict[str, list[list[Turn]]]

PAYLOAD = {
    ("qwen25vl_embeds", 0): ("pixel_values", "image_grid_thw"),
    ("qwen25vl_embeds", 1): ("image_embeds", "image_grid_thw"),
    ("llavanext", 0): ("pixel_values", "image_sizes"),
}
"""What the encoder gets, by case and conversation: the data and the metadata."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    folder: Path = tmp_path_factory.mktemp("cache")
    cases = sorted({case for case, _ in PAYLOAD})
    run("tests.engine.cache", *cases, "--out", str(folder), log=folder / "log", timeout=350)
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


@pytest.fixture(params=PAYLOAD, ids=str)
def key(request: pytest.FixtureRequest) -> tuple[str, int]:
    case: tuple[str, int] = request.param
    return case


def turns(reports: dict[str, Report], key: tuple[str, int], arm: str) -> list[Turn]:
    case, conversation = key
    return reports[case][arm][conversation]


def test_on_and_off_are_the_same(reports: dict[str, Report], key: tuple[str, int]) -> None:
    off, on = turns(reports, key, "off"), turns(reports, key, "on")
    compared = ("prompt", "tokens", "first_logprobs", "cached", "strips", "calls")
    for a, b in zip(off, on, strict=True):
        assert {name: a[name] for name in compared} == {name: b[name] for name in compared}


def test_the_arms_are_what_they_say(reports: dict[str, Report], key: tuple[str, int]) -> None:
    for turn in turns(reports, key, "off"):
        assert not turn["plugin"]["active"]
        assert turn["plugin"]["stats"]["batches"] == 0
    for turn in turns(reports, key, "on"):
        assert turn["plugin"]["active"]
        assert turn["plugin"]["stats"]["batches"] >= len(turn["calls"]) == 1
        assert turn["plugin"]["stats"]["reference_reasons"] == {}


@pytest.mark.parametrize("arm", ["off", "on"])
def test_one_of_two_images_is_covered(
    reports: dict[str, Report], key: tuple[str, int], arm: str
) -> None:
    first, second = turns(reports, key, arm)
    names = sorted(PAYLOAD[key])
    assert first["cached"] == 0
    [strip] = first["strips"]
    assert (strip["computed"], strip["dropped"], strip["left"]) == (0, 0, [names])
    assert second["cached"] > 0
    [strip] = second["strips"]
    assert strip["computed"] == second["cached"]
    covered, whole = strip["left"]
    assert covered == (["image_grid_thw"] if "image_grid_thw" in names else None)
    assert whole == names
    assert strip["dropped"] > 0


@pytest.mark.parametrize("arm", ["off", "on"])
def test_strip_covered_is_what_the_engine_does(
    reports: dict[str, Report], key: tuple[str, int], arm: str
) -> None:
    strips = [strip for turn in turns(reports, key, arm) for strip in turn["strips"]]
    assert [strip["same"] for strip in strips] == [True, True]


@pytest.mark.parametrize("arm", ["off", "on"])
def test_only_what_is_not_covered_reaches_the_encoder(
    reports: dict[str, Report], key: tuple[str, int], arm: str
) -> None:
    calls = [turn["calls"] for turn in turns(reports, key, arm)]
    outputs = []
    for [call] in calls:
        assert sorted(call["fields"]) == sorted(PAYLOAD[key])
        [output] = call["outputs"]
        outputs.append(output)
    # They are of two images.
    assert outputs[0] != outputs[1]
