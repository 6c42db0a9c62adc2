"""The processor that the Ultravox folder brings along; it is copied there, so it stands alone.

Features are padded to the longest clip of one call only, so that two requests have different
lengths and the batcher has to pad.
"""

from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, WhisperFeatureExtractor


class UltravoxProcessor(transformers.ProcessorMixin):
    def __init__(
        self, audio_processor: Any = None, tokenizer: Any = None, stack_factor: int = 8, **_: Any
    ) -> None:
        self.audio_processor = audio_processor
        self.tokenizer = tokenizer
        self.stack_factor = stack_factor
        self.audio_token_replacement = "<|audio|>"

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *_: Any, tokenizer: Any = None, **__: Any
    ) -> "UltravoxProcessor":
        path = pretrained_model_name_or_path
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
        return cls(WhisperFeatureExtractor.from_pretrained(path), tokenizer)

    def __call__(
        self,
        text: Any = None,
        audios: Any = None,
        sampling_rate: int | None = None,
        include_audio_num_chunks: bool = False,
        **_: Any,
    ) -> transformers.BatchFeature:
        data: dict[str, Any] = {}
        if audios:
            features = self.audio_processor(
                audios,
                sampling_rate=sampling_rate,
                padding="longest",
                pad_to_multiple_of=160,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            frames = features["attention_mask"].sum(-1)
            data["audio_values"] = features["input_features"]
            data["audio_lens"] = frames
            data["audio_token_len"] = -(-((frames + 1) // 2) // self.stack_factor)
            if include_audio_num_chunks:
                data["audio_num_chunks"] = torch.ones(len(audios), dtype=torch.long)
        if text is not None:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            data["input_ids"] = torch.tensor([ids])
        return transformers.BatchFeature(data=data)
