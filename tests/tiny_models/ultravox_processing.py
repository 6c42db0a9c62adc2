"""The processor that the Ultravox folder brings along; it is copied there, so it stands alone.

Features are padded to the longest clip of one call only, so that two requests have different
lengths and the batcher has to pad.
"""

import torch
import transformers
from transformers import AutoTokenizer, WhisperFeatureExtractor


class UltravoxProcessor(transformers.ProcessorMixin):
    def __init__(self, audio_processor=None, tokenizer=None, stack_factor=8, **kwargs):
        self.audio_processor = audio_processor
        self.tokenizer = tokenizer
        self.stack_factor = stack_factor
        self.audio_token_replacement = "<|audio|>"

    @classmethod
    def from_pretrained(cls, path, tokenizer=None, **kwargs):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
        return cls(WhisperFeatureExtractor.from_pretrained(path), tokenizer)

    def __call__(
        self, text=None, audios=None, sampling_rate=None, include_audio_num_chunks=False, **kwargs
    ):
        data = {}
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
