"""Three requests made of photographs that ship inside the scikit-image package."""

from importlib import resources
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from tests.tiny_models.media import Request, request
from tests.tiny_models.qwen25vl import IMAGE, VIDEO

FRAMES, FRAME_SIZE = 8, 224


def make_requests(*, mirror_the_cat: bool = False) -> list[Request]:
    """An astronaut; a cup of coffee and a cat; a video of a rocket."""
    cat = photograph("chelsea.png")
    if mirror_the_cat:
        cat = ImageOps.mirror(cat)
    return [
        request(prompt(IMAGE, "Who is this?"), image=[photograph("astronaut.png")]),
        request(prompt(IMAGE * 2, "What do you see?"), image=[photograph("coffee.png"), cat]),
        request(prompt(VIDEO, "What happens here?"), video=[pan(photograph("rocket.jpg"))]),
    ]


def prompt(media: str, question: str) -> str:
    return f"<|im_start|>user\n{media}{question}<|im_end|>\n<|im_start|>assistant\n"


def photograph(name: str) -> Image.Image:
    # Not skimage.data.NAME(): that downloads what it doesn't find.
    with (resources.files("skimage") / "data" / name).open("rb") as file:
        return Image.open(file).convert("RGB")


def pan(photo: Image.Image) -> tuple[np.ndarray, dict[str, Any]]:
    """A video in the form vLLM takes: a square that moves over the photograph."""
    ends = (photo.width - FRAME_SIZE, photo.height - FRAME_SIZE)
    frames = []
    for step in np.linspace(0, 1, FRAMES):
        left, top = (round(end * step) for end in ends)
        frames.append(np.asarray(photo.crop((left, top, left + FRAME_SIZE, top + FRAME_SIZE))))
    metadata = {
        "fps": 2.0,
        "duration": FRAMES / 2.0,
        "total_num_frames": FRAMES,
        "frames_indices": list(range(FRAMES)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return np.stack(frames), metadata
