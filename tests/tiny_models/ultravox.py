"""Ultravox: flat features that are padded with zeros to the longest, `get_data()`."""

import shutil
from pathlib import Path

import numpy as np

from .files import TEXT, VOCABULARY, WHISPER_FEATURES, WHISPER_TOWER, write_json, write_tokenizer
from .media import Request, audio, request

ENGINE_ARGS = {"limit_mm_per_prompt": {"audio": 2}, "trust_remote_code": True}

PROCESSING = Path(__file__).with_name("ultravox_processing.py")


def write(folder: Path) -> None:
    ids = write_tokenizer(
        folder,
        ["<|begin_of_text|>", "<|eot_id|>", "<|audio|>"],
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|eot_id|>",
    )
    config = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "torch_dtype": "bfloat16",
        "audio_token_index": ids["<|audio|>"],
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "stack_factor": 8,
        "projector_act": "swiglu",
        "projector_ln_mid": True,
        "norm_init": 0.4,
        "audio_config": WHISPER_TOWER
        | {
            "model_type": "whisper",
            "vocab_size": VOCABULARY,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 256,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "decoder_start_token_id": 0,
        },
        "text_config": TEXT
        | {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "torch_dtype": "bfloat16",
            "rms_norm_eps": 1e-5,
            "bos_token_id": ids["<|begin_of_text|>"],
            "eos_token_id": ids["<|eot_id|>"],
        },
    }
    write_json(folder, "config.json", config)
    processor = {
        "processor_class": "UltravoxProcessor",
        "auto_map": {"AutoProcessor": f"{PROCESSING.stem}.UltravoxProcessor"},
    }
    write_json(folder, "processor_config.json", processor)
    write_json(
        folder,
        "preprocessor_config.json",
        WHISPER_FEATURES | processor | {"feature_extractor_type": "WhisperFeatureExtractor"},
    )
    shutil.copy(PROCESSING, folder)


def make_requests(rng: np.random.Generator) -> list[Request]:
    return [
        request("<|audio|>hi", audio=[audio(rng, 1.0)]),
        request("<|audio|><|audio|>hi", audio=[audio(rng, 2.5), audio(rng, 0.7)]),
        request("<|audio|>hi", audio=[audio(rng, 4.0)]),
    ]
