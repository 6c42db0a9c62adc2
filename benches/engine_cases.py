"""What the engine's benchmark runs: tiny models whose preprocessing is that of the real ones."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_models import FAMILIES, Request, build, internvl, qwen25vl
from tests.tiny_models.media import image, request

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Engine:
    write: Callable[[Path], None]
    """Makes the model's folder."""
    arguments: dict[str, Any]
    image: str
    """What stands for an image in a prompt."""


@dataclass(frozen=True)
class Case:
    engine: str
    requests: list[list[Size]]
    """The images of each request; all requests are given to the engine at once."""
    seconds: float
    """How long it is measured, unless the number of rounds is given."""

    def make_requests(self, rng: np.random.Generator) -> list[Request]:
        mark = ENGINES[self.engine].image
        return [
            request(
                mark * len(sizes) + "What is this?", image=[image(rng, *size) for size in sizes]
            )
            if sizes
            else {"prompt": "What is a " + " ".join(map(str, rng.integers(0, 99, 20)))}
            for sizes in self.requests
        ]


def _qwen25vl(folder: Path) -> None:
    shutil.copytree(build("qwen25vl"), folder)


def _internvl_448(folder: Path) -> None:
    """The tests' InternVL with the published models' tiles: 448 pixels, up to 12 and a thumbnail.

    Large patches keep the tokens few: 16 for a tile, not 256. The tower is as narrow as attention
    on CPUs allows: here its time only buries what is measured.
    """
    shutil.copytree(build("internvl"), folder)
    tokens = {"image_seq_length": 16}
    vision = {"image_size": [448, 448], "patch_size": [56, 56]}
    tower = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1}
    size = {"size": {"height": 448, "width": 448}}
    config = json.loads((folder / "config.json").read_text())
    _change(
        folder, "config.json", {**tokens, "vision_config": config["vision_config"] | vision | tower}
    )
    _change(folder, "preprocessor_config.json", {**size, "max_patches": 12})
    _change(folder, "video_preprocessor_config.json", size)
    _change(folder, "processor_config.json", tokens)


def _change(folder: Path, name: str, values: dict[str, Any]) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=1))


ENGINES = {
    "qwen25vl": Engine(_qwen25vl, FAMILIES["qwen25vl"].ENGINE_ARGS, qwen25vl.IMAGE),
    "internvl_448": Engine(
        _internvl_448, {"limit_mm_per_prompt": {"image": 8, "video": 0}}, internvl.IMAGE
    ),
}

CASES = {
    "Qwen2.5-VL, text only": Case("qwen25vl", [[]] * 4, 8),
    "Qwen2.5-VL, 1 small image": Case("qwen25vl", [[(224, 224)]], 12),
    "Qwen2.5-VL, 6 images": Case(
        "qwen25vl",
        [[(448, 448), (448, 560)], [(336, 448)], [(448, 448), (560, 336), (336, 336)]],
        35,
    ),
    "InternVL, 8 images of 13 tiles": Case("internvl_448", [[(1200, 1600)] * 8], 105),
}
