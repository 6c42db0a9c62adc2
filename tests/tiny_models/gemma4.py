"""Gemma4: images, clips and a video; ragged bool masks; plain Python numbers as data."""

from pathlib import Path

import numpy as np

from .files import IMAGE_PROCESSOR, TEXT, TOWER, VOCABULARY, write_json, write_tokenizer
from .media import Request, audio, image, request, video

ENGINE_ARGS = {"limit_mm_per_prompt": {"image": 2, "audio": 1, "video": 1}}

IMAGE, AUDIO, VIDEO = "<|image|>", "<|audio|>", "<|video|>"


def write(folder: Path) -> None:
    named = {
        "image_token": IMAGE,
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": AUDIO,
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    ids = write_tokenizer(
        folder,
        ["<pad>", "<eos>", "<bos>", *named.values(), VIDEO, "<|turn>", "<turn|>"],
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        named_tokens=named,
    )
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "image_token_id": ids[IMAGE],
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "video_token_id": ids[VIDEO],
        "audio_token_id": ids[AUDIO],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "text_config": TEXT
        | {
            "model_type": "gemma4_text",
            "tie_word_embeddings": True,
            "global_head_dim": 64,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "final_logit_softcapping": 30.0,
            "pad_token_id": ids["<pad>"],
            "eos_token_id": ids["<eos>"],
            "bos_token_id": ids["<bos>"],
        },
        "vision_config": TOWER
        | {
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 64,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 1024,
            "default_output_length": 70,
        },
        # A narrower audio tower crashes in the CPU kernels.
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "output_proj_dims": 128,
        },
    }
    write_json(folder, "config.json", config)
    processor = IMAGE_PROCESSOR | {
        "processor_class": "Gemma4Processor",
        "do_normalize": False,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "max_soft_tokens": 70,
    }
    write_json(
        folder,
        "processor_config.json",
        {
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "audio_seq_length": 750,
            "audio_ms_per_token": 40,
            "image_processor": processor
            | {"image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 70},
            "video_processor": processor
            | {
                "video_processor_type": "Gemma4VideoProcessor",
                "num_frames": 4,
                "do_sample_frames": True,
            },
            "feature_extractor": {
                "feature_extractor_type": "Gemma4AudioFeatureExtractor",
                "feature_size": 128,
                "sampling_rate": 16000,
                "return_attention_mask": True,
            },
        },
    )


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request(f"<bos>{IMAGE}hi", image=[image(rng, 96, 144)]),
        request(
            f"<bos>{IMAGE}{IMAGE}{AUDIO}hi",
            image=[image(rng, 144, 144), image(rng, 144, 96)],
            audio=[audio(rng, 1.0)],
        ),
        request(f"<bos>{AUDIO}{VIDEO}hi", audio=[audio(rng, 2.2)], video=[video(rng, 4, 96, 96)]),
    ]
