"""InternVL: flat tiles, a shared token id, `get_data()`."""

from pathlib import Path

import numpy as np

from .files import IMAGE_PROCESSOR, TEXT, TOWER, write_json, write_tokenizer
from .media import Request, image, request

ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 2, "video": 0}}

IMAGE = "<IMG_CONTEXT>"


def write(folder: Path) -> None:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": IMAGE,
        "video_token": "<video>",
    }
    ids = write_tokenizer(
        folder,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        named_tokens=named,
    )
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "torch_dtype": "bfloat16",
        "image_token_id": ids[IMAGE],
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "qwen2",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        "vision_config": TOWER
        | {
            "model_type": "internvl_vision",
            "architectures": ["InternVisionModel"],
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "norm_type": "layer_norm",
            "use_qk_norm": False,
            "attention_bias": True,
            "use_mean_pooling": True,
        },
    }
    write_json(folder, "config.json", config)
    processor = IMAGE_PROCESSOR | {
        "processor_class": "InternVLProcessor",
        "size": {"height": 56, "width": 56},
    }
    write_json(
        folder,
        "preprocessor_config.json",
        processor
        | {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
        },
    )
    write_json(
        folder,
        "video_preprocessor_config.json",
        processor | {"video_processor_type": "InternVLVideoProcessor", "do_sample_frames": False},
    )
    write_json(
        folder,
        "processor_config.json",
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    )


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request(IMAGE + "hi", image=[image(rng, 56, 168)]),
        request(IMAGE * 2 + "hi", image=[image(rng, 112, 112), image(rng, 56, 112)]),
        request(IMAGE + "hi", image=[image(rng, 168, 56)]),
    ]
