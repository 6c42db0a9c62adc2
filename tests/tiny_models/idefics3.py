"""Idefics3: two flat fields of different dtypes for the device, counts kept on the host."""

from pathlib import Path

import numpy as np

from .files import IMAGE_PROCESSOR, TEXT, TOWER, write_json, write_tokenizer
from .media import Request, image, request

ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 2}}


def write(folder: Path) -> None:
    tiles = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
    ids = write_tokenizer(
        folder,
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<end_of_utterance>",
            *tiles,
        ],
        bos="<|begin_of_text|>",
        eos="<end_of_utterance>",
        pad="<|end_of_text|>",
    )
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "torch_dtype": "bfloat16",
        "image_token_id": ids["<image>"],
        "pad_token_id": ids["<|end_of_text|>"],
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "bos_token_id": ids["<|begin_of_text|>"],
            "eos_token_id": ids["<end_of_utterance>"],
            "pad_token_id": ids["<|end_of_text|>"],
        },
        "vision_config": TOWER
        | {"model_type": "idefics3_vision", "image_size": 56, "patch_size": 14},
    }
    write_json(folder, "config.json", config)
    write_json(
        folder,
        "preprocessor_config.json",
        IMAGE_PROCESSOR
        | {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_pad": True,
            "do_image_splitting": True,
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
        },
    )
    write_json(
        folder,
        "processor_config.json",
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    )


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request("<image>hi", image=[image(rng, 56, 168)]),
        request("<image><image>hi", image=[image(rng, 112, 112), image(rng, 56, 112)]),
        request("<image>hi", image=[image(rng, 168, 56)]),
    ]
