"""Load one engine, run requests through it, write what was seen as JSON.

    python -m tests.engine.driver llavanext

runs two sets of inputs, A and B, with mmcollate switched off and on, and A once more with one byte
flipped behind mmcollate. With `--as-loaded` nothing is switched: A and B run with whatever vLLM
activated by itself. An engine can't be loaded twice in one process, so each run takes a new one.
"""

import argparse
import faulthandler
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tiny_models import CACHE, build
from ..tiny_models.weights import randomize
from . import probe
from .cases import CASES, Case
from .process import ENVIRONMENT

if TYPE_CHECKING:
    from vllm import LLM

Run = dict[str, Any]
SEEDS = {"A": 0, "B": 1}


def load(case: Case, *, saved_weights: bool) -> "LLM":
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # vLLM's own dummy weights hide whether the answer depends on the input.
    DummyModelLoader.load_weights = lambda self, model, model_config: randomize(model)
    llm = LLM(
        str(build(case.model, saved_weights=saved_weights)),
        load_format="auto" if saved_weights else "dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        **case.engine_args,
    )
    llm.apply_model(probe.attach)
    return llm


def run(llm: "LLM", case: Case, seed: int, *, together: bool = True) -> Run:
    """One set of requests, with all caches emptied so that every item reaches the encoder."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
    observe(llm)
    requests = case.make_requests(np.random.default_rng(seed))
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
    outputs = []
    for batch in [requests] if together else [[request] for request in requests]:
        outputs += llm.generate(batch, sampling, use_tqdm=False)
    return {"requests": [answer(output) for output in outputs], **observe(llm)}


def answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    first = sorted((token, p.logprob) for token, p in completion.logprobs[0].items())
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(completion.token_ids),
        "first_logprobs": first,
    }


def observe(llm: "LLM") -> dict[str, Any]:
    """What the engine's process saw since the last time."""
    [calls] = llm.apply_model(probe.take_calls)
    [plugin] = llm.apply_model(probe.take_plugin)
    return {"calls": calls, "plugin": plugin}


def compare(llm: "LLM", case: Case) -> dict[str, Run]:
    from mmcollate.integrations import vllm as plugin

    runs = {}
    for inputs, seed in SEEDS.items():
        for arm, switch in (("off", plugin.deactivate), ("on", plugin.activate)):
            switch()
            runs[f"{inputs} {arm}"] = run(llm, case, seed)
    with probe.one_byte_flipped():
        runs["A fault"] = run(llm, case, SEEDS["A"])
    return runs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run one case through a real engine.")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--as-loaded", action="store_true", help="switch nothing on or off")
    parser.add_argument("--saved-weights", action="store_true", help="load them from a file")
    parser.add_argument("--out", type=Path, help="default: .cache/engine/CASE.json")
    parser.add_argument("--timeout", type=float, default=170, help="seconds until it gives up")
    options = parser.parse_args(arguments)
    # The kernels can hang where no signal is handled; this ends the process even there.
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    case = CASES[options.case]
    llm = load(case, saved_weights=options.saved_weights)
    report: dict[str, Any] = {
        "case": options.case,
        "frontend": probe.take_plugin(),
        "loaded": observe(llm),
    }
    if options.as_loaded:
        # One request at a time: which ones a separate engine's process batches depends on timing.
        report["runs"] = {i: run(llm, case, seed, together=False) for i, seed in SEEDS.items()}
    else:
        report["runs"] = compare(llm, case)

    out = options.out or CACHE / "engine" / f"{options.case}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
