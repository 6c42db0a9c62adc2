"""One engine of the benchmark, in a process of its own: loads it, measures its cases, writes JSON.

Started by `benches/engine.py`, as an engine can't be loaded twice in one process.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

set_num_threads = torch.set_num_threads  # vLLM's worker replaces it

import mmcollate  # noqa: E402
import numpy as np  # noqa: E402
from mmcollate.bench.measure import quartiles, ratio  # noqa: E402
from mmcollate.reference import iter_leaves  # noqa: E402

from benches.engine_cases import CASES, ENGINES, Case  # noqa: E402
from demo.engine import switch  # noqa: E402
from tests.tiny_models import Request  # noqa: E402
from tests.tiny_models.weights import randomize  # noqa: E402

ARMS = ("vllm", "again", "mmcollate")
PARTS = ("preprocessing, server", "preprocessing, offline", "engine steps", "whole run")
NEW_TOKENS = 4


@dataclass
class Side:
    """What one side spent on collation."""

    calls: int = 0
    items: int = 0
    seconds: float = 0.0
    copied: int = 0
    """Bytes of the batches that are not memory of the items; counted only where asked for."""


@dataclass
class Sample:
    """One arm's turn."""

    seconds: dict[str, float]
    """By part."""
    api: Side
    worker: Side
    tokens: list[list[int]]


@contextmanager
def watched(*, count_bytes: bool = False) -> Iterator[tuple[Side, Side]]:
    """Time inside the batcher, whichever is in place: that of the API side, which has no device
    to name, and that of the worker."""
    from vllm.multimodal import utils

    collate = utils.group_and_batch_mm_items
    api, worker = Side(), Side()

    def timed(items: Any, **options: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        side = api if options.get("device") is None else worker
        side.calls += 1
        side.items += len(items)
        groups = collate(items, **options)
        while True:
            start = time.perf_counter()
            group = next(groups, None)
            side.seconds += time.perf_counter() - start
            if group is None:
                return
            if count_bytes:
                side.copied += copied_bytes(items, group[1])
            yield group

    utils.group_and_batch_mm_items = timed
    try:
        yield api, worker
    finally:
        utils.group_and_batch_mm_items = collate


def copied_bytes(items: list[Any], batch: dict[str, Any]) -> int:
    leaves = iter_leaves([elem.data for item in items for elem in item.values()])
    sources = {x.untyped_storage().data_ptr() for x in leaves if isinstance(x, torch.Tensor)}
    return sum(
        x.nbytes
        for x in iter_leaves(batch)
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in sources
    )


class Stopwatch:
    """Sums the time of a function's calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._function: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - start


@dataclass
class Rig:
    """An engine in this process, with a stopwatch at each part of it."""

    llm: Any
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        core = self.llm.llm_engine.engine_core
        core.add_request = through_a_message(core.add_request)
        self._preprocess = Stopwatch(self.llm.renderer, "render_cmpl")
        self._step = Stopwatch(self.llm.llm_engine, "step")

    def preprocess(self, requests: list[Request], *, count_bytes: bool = False) -> Sample:
        """As vLLM's server does it: in the thread that it keeps for that. The results are
        destroyed inside the timing, as there a request's temporary batch is."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        renderer = self.llm.renderer
        prompts = [parse_model_prompt(self.llm.model_config, request) for request in requests]
        self._empty_caches()
        with watched(count_bytes=count_bytes) as (api, worker):
            start = time.perf_counter()
            rendered = self.loop.run_until_complete(renderer.render_cmpl_async(prompts))
            tokens = [list(prompt["prompt_token_ids"]) for prompt in rendered]
            del rendered
            seconds = time.perf_counter() - start
        return Sample({PARTS[0]: seconds}, api, worker, tokens)

    def generate(self, requests: list[Request], *, count_bytes: bool = False) -> Sample:
        """All of it, as a script that calls `LLM.generate` does: preprocessing in this thread."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        self._empty_caches()
        self._preprocess.seconds = self._step.seconds = 0.0
        with watched(count_bytes=count_bytes) as (api, worker):
            start = time.perf_counter()
            answers = self.llm.generate(requests, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
        times = (self._preprocess.seconds, self._step.seconds, seconds)
        tokens = [[*x.prompt_token_ids, *x.outputs[0].token_ids] for x in answers]
        return Sample(dict(zip(PARTS[1:], times, strict=True)), api, worker, tokens)

    def _empty_caches(self) -> None:
        """So that every image is preprocessed and reaches the encoder; they are the ones that vLLM
        has by default."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        gc.collect()


def through_a_message(add_request: Callable[[Any], None]) -> Callable[[Any], None]:
    """Each request in vLLM's own message format, copied as a socket would: else the worker of an
    engine in this process would get the API side's memory, which no other worker does."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)

    def add(request: Any) -> None:
        add_request(decoder.decode([bytearray(frame) for frame in encoder.encode(request)]))

    return add


def load(name: str, folder: Path) -> Rig:
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # vLLM's own dummy weights hide whether the answer depends on the input.
    DummyModelLoader.load_weights = lambda self, model, model_config: randomize(model)
    ENGINES[name].write(folder)
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=8,
        **ENGINES[name].arguments,
    )
    # An API process has torch's own, and sets one thread while it preprocesses.
    torch.set_num_threads = set_num_threads
    executor: ThreadPoolExecutor = llm.renderer._mm_executor
    use_one_thread()
    executor.submit(use_one_thread).result()
    gc.collect()
    gc.freeze()
    return Rig(llm)


def use_one_thread() -> None:
    """torch counts the threads of each thread apart."""
    set_num_threads(1)
    assert torch.get_num_threads() == 1


def turn(
    run: Callable[..., Sample], arm: str, requests: list[Request], *, count_bytes: bool = False
) -> Sample:
    """One arm's turn. Fails if the arm isn't what it says."""
    # What is switched on checks itself; before each arm, so that all find the same caches.
    switch(False)
    switch(True)
    switch(arm == "mmcollate")
    mmcollate.reset_stats()
    sample = run(requests, count_bytes=count_bytes)
    made, calls = mmcollate.stats()["batches"], sample.api.calls + sample.worker.calls
    assert made == (calls if arm == "mmcollate" else 0), f"{arm}: {made} of {calls} batches"
    return sample


def rounds_of(
    run: Callable[..., Sample], case: Case, rounds: int | None, seconds: float
) -> tuple[dict[str, list[Sample]], dict[str, Sample]]:
    """The samples of each arm, round by round, and those of the round that warmed up."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    rng = np.random.default_rng(0)
    warm = {arm: turn(run, arm, case.make_requests(rng), count_bytes=True) for arm in ARMS}
    stop = time.perf_counter() + seconds
    while rounds is None or len(samples[ARMS[0]]) < rounds:
        if rounds is None and time.perf_counter() > stop and len(samples[ARMS[0]]) >= 2:
            break
        requests = case.make_requests(rng)  # new images, the same for all arms
        for arm in random.sample(ARMS, len(ARMS)):
            samples[arm].append(turn(run, arm, requests))
        expected = samples[ARMS[0]][-1].tokens
        for arm in ARMS:
            if samples[arm][-1].tokens != expected:
                raise SystemExit(f"the tokens differ between vllm and {arm}")
    return samples, warm


def measure(rig: Rig, case: Case, rounds: int | None) -> dict[str, Any]:
    apart = rounds_of(rig.preprocess, case, rounds, case.seconds / 2)
    whole = rounds_of(rig.generate, case, rounds, case.seconds / 2)
    parts = {part: summary(part, *(apart if part == PARTS[0] else whole)) for part in PARTS}
    images = sum(map(len, case.requests))
    seen = whole[1]["vllm"].worker.items
    assert seen == images, f"{seen} of {images} images reached the encoder"
    return {
        "engine": case.engine,
        "requests": len(case.requests),
        "images": images,
        "tokens_compared": sum(
            len(tokens)
            for samples, _ in (apart, whole)
            for s in samples["vllm"]
            for tokens in s.tokens
        ),
        "parts": parts,
    }


def summary(part: str, samples: dict[str, list[Sample]], warm: dict[str, Sample]) -> dict[str, Any]:
    """Quartiles of the times and of each round's ratios; collation's share of the time."""
    times = {arm: [s.seconds[part] for s in samples[arm]] for arm in ARMS}

    return {
        "rounds": len(times["vllm"]),
        "ms": {arm: [t * 1e3 for t in quartiles(times[arm])] for arm in ARMS},
        "speedup": ratio(times["vllm"], times["mmcollate"]),
        "a_a": ratio(times["vllm"], times["again"]),
        "collation": {
            arm: collation(part, samples[arm], warm[arm]) for arm in ("vllm", "mmcollate")
        },
    }


def collation(part: str, samples: list[Sample], warm: Sample) -> dict[str, Any]:
    spent = [sum(side.seconds for side in sides(part, s)) for s in samples]
    shares = [taken / s.seconds[part] for taken, s in zip(spent, samples, strict=True)]
    return {
        "calls": sum(side.calls for side in sides(part, warm)),
        "ms": [t * 1e3 for t in quartiles(spent)],
        "share": quartiles(shares),
        "copied_bytes": sum(side.copied for side in sides(part, warm)),
    }


def sides(part: str, sample: Sample) -> list[Side]:
    """The sides whose collation falls into this part."""
    of = {"engine steps": [sample.worker], "whole run": [sample.api, sample.worker]}
    return of.get(part, [sample.api])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--case", action="append", choices=list(CASES), required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is written")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rig = load(options.engine, options.folder)
    figures = {name: measure(rig, CASES[name], options.rounds) for name in options.case}
    options.json.write_text(json.dumps(figures))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly end of the engine takes seconds


if __name__ == "__main__":
    main()
