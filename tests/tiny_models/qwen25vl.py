"""Qwen2.5-VL: flat pixels with batched grids, images and videos."""

from pathlib import Path

import numpy as np
import torch

from .files import IMAGE_PROCESSOR, TEXT, write_json, write_tokenizer
from .media import Request, image, request, video

ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 4, "video": 2}}
EMBEDS_ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 4, "video": 0}, "enable_mm_embeds": True}

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}"
    "{% elif 'video' in c.type %}" + VIDEO + "{% else %}" + IMAGE + "{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def write(folder: Path) -> None:
    ids = write_tokenizer(
        folder,
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|vision_pad|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    text = {k: v for k, v in TEXT.items() if k != "head_dim"}
    config = text | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_size": 128,
            "hidden_act": "silu",
            "intermediate_size": 256,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 128,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }
    write_json(folder, "config.json", config)
    processor = IMAGE_PROCESSOR | {
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    write_json(
        folder,
        "preprocessor_config.json",
        processor | {"image_processor_type": "Qwen2VLImageProcessor"},
    )
    write_json(
        folder,
        "video_preprocessor_config.json",
        processor | {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": False},
    )


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request(
            _prompt(IMAGE + VIDEO), image=[image(rng, 112, 140)], video=[video(rng, 4, 56, 84)]
        ),
        request(_prompt(IMAGE * 2), image=[image(rng, 140, 140), image(rng, 168, 112)]),
        request(_prompt(VIDEO * 2), video=[video(rng, 6, 84, 84), video(rng, 4, 112, 56)]),
    ]


def make_embeds_requests(rng: np.random.Generator) -> list[Request]:
    """Embeddings between two raw images: other fields, so one step needs three batches."""
    height, width = 8, 6
    values = rng.standard_normal((height * width // 4, TEXT["hidden_size"]))
    embeds = {
        "image_embeds": torch.from_numpy(values).to(torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return [
        request(_prompt(IMAGE), image=[image(rng, 112, 140)]),
        request(_prompt(IMAGE), image=embeds),
        request(_prompt(IMAGE), image=[image(rng, 84, 84)]),
    ]


def _prompt(media: str) -> str:
    return f"<|im_start|>user\n{media}hi<|im_end|>\n"
