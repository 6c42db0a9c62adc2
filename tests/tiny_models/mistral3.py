"""Mistral3 (Pixtral tower): batched uint8 images of different sizes, some not contiguous."""

from pathlib import Path

import numpy as np

from .files import IMAGE_PROCESSOR, TEXT, TOWER, write_json, write_tokenizer
from .media import Request, image, request

ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 2}}

TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}


def write(folder: Path) -> None:
    ids = write_tokenizer(
        folder,
        ["<unk>", "<s>", "</s>", "<pad>", *TOKENS.values()],
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        named_tokens=TOKENS,
    )
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "torch_dtype": "bfloat16",
        "image_token_index": ids["[IMG]"],
        "image_token_id": ids["[IMG]"],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": TEXT
        | {
            "model_type": "mistral",
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
            "pad_token_id": ids["<pad>"],
        },
        "vision_config": TOWER
        | {
            "model_type": "pixtral",
            "head_dim": 64,
            "image_size": 224,
            "patch_size": 14,
            "num_channels": 3,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
        },
    }
    write_json(folder, "config.json", config)
    write_json(
        folder,
        "preprocessor_config.json",
        IMAGE_PROCESSOR
        | {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": 28,
            "size": {"longest_edge": 224},
        },
    )
    write_json(
        folder,
        "processor_config.json",
        TOKENS | {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    )


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request("[IMG]hi", image=[image(rng, 56, 168)]),
        request("[IMG][IMG]hi", image=[image(rng, 112, 112), image(rng, 56, 112)]),
        request("[IMG]hi", image=[image(rng, 112, 112)]),
    ]
