"""Tiny random-weight models of real families: seconds to load on a CPU, no download.

`build("llavanext")` writes the folder (config, tokenizer, processor files) and returns its path.
Weights come either from the loader (see `weights.randomize`) or, with `saved_weights=True`, from a
safetensors file in the folder.
"""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import gemma4, idefics3, internvl, llavanext, mistral3, qwen3asr, qwen25vl, ultravox
from .media import Request
from .weights import save_weights

__all__ = ["CACHE", "FAMILIES", "Family", "Request", "build"]

CACHE = Path(__file__).resolve().parents[2] / ".cache"


class Family(Protocol):
    """What each family's module offers."""

    ENGINE_ARGS: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write everything but the weights."""

    def make_requests(self, rng: np.random.Generator) -> list[Request]:
        """Three requests: the same shapes for every `rng`, other values."""


FAMILIES: dict[str, Family] = {
    "gemma4": gemma4,
    "idefics3": idefics3,
    "internvl": internvl,
    "llavanext": llavanext,
    "mistral3": mistral3,
    "qwen25vl": qwen25vl,
    "qwen3asr": qwen3asr,
    "ultravox": ultravox,
}


def build(name: str, cache_dir: Path | None = None, *, saved_weights: bool = False) -> Path:
    """The folder of family `name`, written unless this very version of it is there already."""
    cache = CACHE / "tiny_models" if cache_dir is None else cache_dir
    variant = f"{name}-weights" if saved_weights else name
    folder = cache / f"{variant}-{_version()}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{variant}-", dir=cache))
    try:
        FAMILIES[name].write(unfinished)
        if saved_weights:
            save_weights(unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _version() -> str:
    """A hash of all that decides the content, so that a stale folder is never used."""
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
