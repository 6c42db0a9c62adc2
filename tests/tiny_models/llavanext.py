"""LLaVA-NeXT: batched tiles, another number of them for every image."""

from pathlib import Path

import numpy as np

from .files import IMAGE_PROCESSOR, TEXT, TOWER, VOCABULARY, write_json, write_tokenizer
from .media import Request, image, request

ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 2}}

# Model and processor must agree on them.
GRID_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]


def write(folder: Path) -> None:
    ids = write_tokenizer(
        folder,
        ["<unk>", "<s>", "</s>", "<pad>", "<image>"],
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    )
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "torch_dtype": "bfloat16",
        "image_token_index": ids["<image>"],
        "image_token_id": ids["<image>"],
        "image_grid_pinpoints": GRID_PINPOINTS,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "use_image_newline_parameter": True,
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
            "pad_token_id": ids["<pad>"],
        },
        "vision_config": TOWER
        | {
            "model_type": "clip_vision_model",
            "image_size": 56,
            "patch_size": 14,
            "projection_dim": 128,
            "vocab_size": VOCABULARY,
        },
    }
    write_json(folder, "config.json", config)
    processor = IMAGE_PROCESSOR | {
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "LlavaNextProcessor",
        "crop_size": {"height": 56, "width": 56},
        "size": {"shortest_edge": 56},
        "do_center_crop": True,
        "do_pad": True,
        "image_grid_pinpoints": GRID_PINPOINTS,
    }
    write_json(folder, "preprocessor_config.json", processor)
    write_json(
        folder,
        "processor_config.json",
        {
            "processor_class": "LlavaNextProcessor",
            "image_token": "<image>",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request("<image>hi", image=[image(rng, 56, 168)]),
        request("<image><image>hi", image=[image(rng, 112, 112), image(rng, 56, 112)]),
        request("<image>hi", image=[image(rng, 168, 56)]),
    ]
