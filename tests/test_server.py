"""The OpenAI server, asked by the ordinary client: the same answers with mmcollate and without."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.engine.process import active_in
from tests.engine.server import ask, serving
from tests.tiny_models import build
from tests.tiny_models.media import image

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("openai") is None,
        reason="needs vLLM, which has no wheel for this Python, and openai",
    ),
    pytest.mark.timeout(600),
]

Answers = dict[str, list[dict[str, Any]]]
SIZES = [[(112, 140)], [(140, 140), (168, 112)], [(84, 84)]]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, str]:
    return answers(tmp_path_factory)


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, str]:
    return answers(tmp_path_factory, {"MMCOLLATE_DISABLE": "1"})


def answers(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str] | None = None
) -> tuple[Answers, str]:
    """The answers to two sets of images, and the server's log."""
    log = tmp_path_factory.mktemp("server") / "log"
    # The weights are on disk, so that the server is started as anybody would.
    folder = build("qwen25vl", saved_weights=True)
    with serving(folder, images=2, log=log, environment=environment) as url:
        answers = {}
        for inputs, seed in (("A", 0), ("B", 1)):
            rng = np.random.default_rng(seed)
            # One after the other: which ones the engine batches would depend on timing.
            answers[inputs] = [ask(url, [image(rng, *s) for s in sizes]) for sizes in SIZES]
    return answers, log.read_text()


def test_the_log_says_where_it_is_active(on: tuple[Answers, str], off: tuple[Answers, str]) -> None:
    assert active_in(on[1]) >= {"EngineCore", "VllmWorker"}
    assert not active_in(off[1])


def test_on_and_off_are_the_same(on: tuple[Answers, str], off: tuple[Answers, str]) -> None:
    assert on[0] == off[0]


def test_every_question_matters(on: tuple[Answers, str]) -> None:
    """Guards the comparison: other images get other answers."""
    for a, b in zip(on[0]["A"], on[0]["B"], strict=True):
        assert a["usage"] == b["usage"]
        assert a["logprobs"] != b["logprobs"]
