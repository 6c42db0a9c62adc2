"""Random images, clips and videos in the forms that vLLM takes."""

from typing import Any

import numpy as np
from PIL import Image

Request = dict[str, Any]
SAMPLE_RATE = 16000


def request(prompt: str, **media: Any) -> Request:
    return {"prompt": prompt, "multi_modal_data": media}


def image(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def audio(rng: np.random.Generator, seconds: float) -> tuple[np.ndarray, int]:
    samples = rng.standard_normal(int(SAMPLE_RATE * seconds)) * 0.1
    return samples.astype(np.float32), SAMPLE_RATE


def video(
    rng: np.random.Generator, frames: int, height: int, width: int
) -> tuple[np.ndarray, dict[str, Any]]:
    pixels = rng.integers(0, 255, (frames, height, width, 3), dtype=np.uint8)
    metadata = {
        "fps": 2.0,
        "duration": frames / 2.0,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return pixels, metadata
