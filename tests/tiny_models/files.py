"""What the families' folders have in common: JSON files, tokenizer, the small language model."""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 320  # 256 bytes and room for the special tokens

# head_dim 64 is the smallest that vLLM's attention on CPUs takes.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

# A vision or audio tower as wide as the language model.
TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}

WHISPER_TOWER: dict[str, Any] = {
    "num_mel_bins": 32,
    "d_model": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "max_source_positions": 1500,
    "scale_embedding": False,
    "activation_function": "gelu",
}

WHISPER_FEATURES: dict[str, Any] = {
    "feature_size": 32,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "padding_side": "right",
    "return_attention_mask": True,
}

IMAGE_PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "resample": 3,
    "rescale_factor": 1 / 255,
}


def write_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content, indent=1))


def write_tokenizer(
    folder: Path,
    special_tokens: list[str],
    *,
    eos: str,
    pad: str,
    bos: str | None = None,
    chat_template: str | None = None,
    named_tokens: dict[str, str] | None = None,
) -> dict[str, int]:
    """A byte-level tokenizer without merges; returns the ids of the special tokens.

    Processors read `named_tokens` (such as `image_token`) as attributes of the tokenizer.
    """
    # Imported here, so that listing the models works without them.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens = {"eos_token": eos, "pad_token": pad} | ({"bos_token": bos} if bos else {})
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, additional_special_tokens=special_tokens, **tokens
    )
    tokenizer.save_pretrained(folder)

    config = json.loads((folder / "tokenizer_config.json").read_text())
    if chat_template:
        config["chat_template"] = chat_template
    if named_tokens:
        config["extra_special_tokens"] = named_tokens
    write_json(folder, "tokenizer_config.json", config)
    ids: Any = tokenizer.convert_tokens_to_ids(special_tokens)
    return dict(zip(special_tokens, ids, strict=True))
