"""Qwen3-ASR: features joined along their second dimension, ragged masks, `get_data()`."""

from pathlib import Path

import numpy as np

from .files import TEXT, WHISPER_FEATURES, WHISPER_TOWER, write_json, write_tokenizer
from .media import Request, audio, request

ENGINE_ARGS = {"limit_mm_per_prompt": {"audio": 2}}

AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"


def write(folder: Path) -> None:
    ids = write_tokenizer(
        folder,
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|audio_pad|>",
            "<|audio_start|>",
            "<|audio_end|>",
            "<asr_text>",
        ],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        named_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )
    rope = {
        "rope_type": "default",
        "type": "default",
        "mrope_section": [8, 12, 12],
        "mrope_interleaved": True,
        "interleaved": True,
    }
    thinker = {
        "model_type": "qwen3_asr_thinker",
        "torch_dtype": "bfloat16",
        "audio_token_id": ids["<|audio_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_config": WHISPER_TOWER
        | {
            "model_type": "qwen3_asr_audio_encoder",
            "n_window": 50,
            "n_window_infer": 800,
            "output_dim": 128,
            "conv_chunksize": 500,
            "downsample_hidden_size": 16,
        },
        "text_config": TEXT
        | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": rope},
    }
    config = {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "torch_dtype": "bfloat16",
        "support_languages": [],
        "thinker_config": thinker,
    }
    write_json(folder, "config.json", config)
    write_json(
        folder,
        "preprocessor_config.json",
        WHISPER_FEATURES
        | {
            "feature_extractor_type": "Qwen3ASRFeatureExtractor",
            "processor_class": "Qwen3ASRProcessor",
            "n_window": 50,
        },
    )
    write_json(folder, "processor_config.json", {"processor_class": "Qwen3ASRProcessor"})


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request(AUDIO + "hi", audio=[audio(rng, 1.0)]),
        request(AUDIO * 2 + "hi", audio=[audio(rng, 2.5), audio(rng, 0.7)]),
        request(AUDIO + "hi", audio=[audio(rng, 4.0)]),
    ]
