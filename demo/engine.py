"""The real engine, in this process, and what is seen of one run of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mmcollate
import torch

from tests.tiny_models import Request, build
from tests.tiny_models.qwen25vl import ENGINE_ARGS
from tests.tiny_models.weights import randomize

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # To compile its sampling takes longer than the demo.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Else the engine is another process, where nothing can be watched from here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Batch:
    """One call for a batch by the engine."""

    items: list[Any]
    options: dict[str, Any]
    """The other arguments: device and pin_memory."""
    groups: list[tuple[int, dict[str, Any]]]
    """What the engine got: number of items and fields. More than one only if items don't fit
    together, which does not happen here."""

    @property
    def modality(self) -> str:
        return "video" if "video_grid_thw" in self.items[0] else "image"


@dataclass(frozen=True)
class Run:
    """What one run of the requests gave."""

    made_by_mmcollate: int
    """Batches, counted by mmcollate itself."""
    encoder_outputs: list[torch.Tensor]
    """One for each image and video, in the order in which they were encoded."""
    logprobs: list[dict[int, float]]
    """Of each request: the likeliest first tokens, with the logarithms of their probabilities."""
    batches: list[Batch]

    @property
    def encoder_inputs(self) -> list[dict[str, Any]]:
        """The fields of each image and video, in the order of the outputs."""
        items = [item for batch in self.batches for item in batch.items]
        # vLLM orders the fields of an item differently from run to run.
        return [{name: item[name].data for name in sorted(item)} for item in items]


class Engine:
    def __init__(self) -> None:
        from vllm import LLM
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        # With vLLM's own dummy weights, every image would give the same answer.
        DummyModelLoader.load_weights = lambda self, model, model_config: randomize(model)
        self._llm = LLM(
            str(build("qwen25vl")),
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=8,
            **ENGINE_ARGS,
        )
        self._encoder_outputs: list[torch.Tensor] = []
        self._llm.apply_model(self._watch_encoder)

    def _watch_encoder(self, model: torch.nn.Module) -> None:
        embed = model.embed_multimodal

        def embed_multimodal(**fields: Any) -> Any:
            outputs = embed(**fields)
            self._encoder_outputs.extend(output.clone() for output in outputs)
            return outputs

        model.embed_multimodal = embed_multimodal

    def run(self, requests: list[Request], *, mmcollate_on: bool) -> Run:
        """All requests at once, with empty caches, so that every image reaches the encoder."""
        from vllm import SamplingParams

        switch(mmcollate_on)
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        self._encoder_outputs.clear()
        mmcollate.reset_stats()
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
        with watched_batches() as batches:
            answers = self._llm.generate(requests, sampling, use_tqdm=False)
        return Run(
            made_by_mmcollate=mmcollate.stats()["batches"],
            encoder_outputs=list(self._encoder_outputs),
            logprobs=[
                {token: p.logprob for token, p in answer.outputs[0].logprobs[0].items()}
                for answer in answers
            ],
            batches=batches,
        )


def prepare_environment() -> None:
    """Must come before the first import of vLLM."""
    os.environ.update(ENVIRONMENT)


def switch(on: bool) -> None:
    from mmcollate.integrations import vllm as plugin

    done = plugin.activate() if on else plugin.deactivate()
    if not done:
        raise RuntimeError(
            f"mmcollate can't be switched {'on' if on else 'off'}: {plugin.status()}"
        )


@contextmanager
def watched_batches() -> Iterator[list[Batch]]:
    """Note every batch that is made in the meantime, by whichever code is in place."""
    from vllm.multimodal import utils

    collate = utils.group_and_batch_mm_items
    batches: list[Batch] = []

    def watched(items: Any, **options: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        batch = Batch(list(items), options, [])
        batches.append(batch)
        for group in collate(items, **options):
            batch.groups.append(group)
            yield group

    utils.group_and_batch_mm_items = watched
    try:
        yield batches
    finally:
        utils.group_and_batch_mm_items = collate
