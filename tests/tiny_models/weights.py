"""Random weights with which the output depends on every input.

Weights of one small size for all layers, such as vLLM's dummy ones, give the same answer whatever
the image is.
"""

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def randomize(model: "nn.Module") -> None:
    """Normal weights scaled by fan-in, each seeded by its name; norms one; small biases."""
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim <= 1:
            values = torch.ones(tensor.shape) if name.endswith("weight") else values * 0.1
        elif "embed" not in name or "patch" in name:
            values *= tensor[0].numel() ** -0.5
        tensor.copy_(values)


def save_weights(folder: Path) -> None:
    """Add a safetensors file to a folder, made by the Transformers model of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    auto: Any = AutoModelForImageTextToText
    model = auto.from_config(config).to(torch.bfloat16)
    randomize(model)
    written = (folder / "config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(written)  # save_pretrained writes its own over it
