"""Ask engines about two images of which the prefix cache covers one, with mmcollate off and on.

    python -m tests.engine.cache qwen25vl_embeds llavanext --out FOLDER

Two requests of one conversation, one after the other: the first about one image, the second about
that image and another. In between all that is known of images is forgotten, so that the second
image must be encoded and the first is only in the key-value cache. Noted besides is what the
scheduler strips, and whether `mmcollate.strip_covered` strips the same.
"""

import argparse
import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..tiny_models import Request, qwen25vl
from ..tiny_models.files import TEXT
from ..tiny_models.media import image, request
from . import driver
from .cases import CASES
from .process import ENVIRONMENT

if TYPE_CHECKING:
    from vllm import LLM

Conversation = list[Request]


def llava_images(rng: np.random.Generator) -> list[Conversation]:
    first, second = image(rng, 112, 112), image(rng, 56, 112)
    text = "tell me more about it " * 40
    return [
        [
            request(f"<image>{text}", image=[first]),
            request(f"<image>{text}<image>hi", image=[first, second]),
        ]
    ]


def qwen_images(rng: np.random.Generator) -> list[Conversation]:
    """Raw images, then embeddings, of which the first is covered too."""
    return [
        _about(image(rng, 168, 168), image(rng, 112, 140)),
        _about(_embeds(rng, 12, 14), _embeds(rng, 8, 6)),
    ]


def _about(first: Any, second: Any) -> Conversation:
    start = f"<|im_start|>user\n{qwen25vl.IMAGE}{'tell me more about it ' * 40}"
    # Embeddings of several images come in one dict.
    both = [first, second]
    if isinstance(first, dict):
        both = {name: torch.cat([first[name], second[name]]) for name in first}
    return [
        request(f"{start}<|im_end|>\n", image=first),
        request(f"{start}{qwen25vl.IMAGE}hi<|im_end|>\n", image=both),
    ]


def _embeds(rng: np.random.Generator, height: int, width: int) -> dict[str, torch.Tensor]:
    values = rng.standard_normal((height * width // 4, TEXT["hidden_size"]))
    return {
        "image_embeds": torch.from_numpy(values).to(torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


CONVERSATIONS = {"qwen25vl_embeds": qwen_images, "llavanext": llava_images}

_strips: list[dict[str, Any]] = []


def watch_strips() -> None:
    """From now on, note what the scheduler strips, beside what mmcollate would."""
    from mmcollate import strip_covered
    from vllm.v1.core.sched import output

    strip = output.strip_covered_mm_data

    def watched(features: list[Any], computed: int, uses_mrope: bool = False) -> list[Any]:
        theirs = strip(features, computed, uses_mrope=uses_mrope)
        ours = strip_covered(features, computed, positions_needed=uses_mrope)
        _strips.append(
            {
                "computed": computed,
                "left": [sorted(x.data) if x.data is not None else None for x in theirs],
                "dropped": ours.bytes_dropped,
                "same": _parts(ours.features) == _parts(theirs),
            }
        )
        return theirs

    output.strip_covered_mm_data = watched


def _parts(features: list[Any]) -> list[Any]:
    return [
        (
            x.modality,
            x.identifier,
            x.mm_hash,
            id(x.mm_position),
            None if x.data is None else {name: id(elem) for name, elem in x.data.items()},
        )
        for x in features
    ]


def converse(llm: "LLM", conversation: Conversation) -> list[dict[str, Any]]:
    """The requests one after the other; the prefix cache is the only one that lasts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
    llm.reset_prefix_cache()
    turns = []
    for turn in conversation:
        llm.reset_mm_cache()
        llm.llm_engine.reset_encoder_cache()
        driver.observe(llm)
        _strips.clear()
        [output] = llm.generate([turn], sampling, use_tqdm=False)
        seen = {"cached": output.num_cached_tokens, "strips": list(_strips)}
        turns.append(driver.answer(output) | seen | driver.observe(llm))
    return turns


def run_case(case: str, out: Path) -> None:
    from mmcollate.integrations import vllm as plugin

    faulthandler.dump_traceback_later(170, exit=True)
    llm = driver.load(CASES[case], saved_weights=False)
    watch_strips()
    report = {}
    for arm, switch in (("off", plugin.deactivate), ("on", plugin.activate)):
        switch()
        conversations = CONVERSATIONS[case](np.random.default_rng(0))
        report[arm] = [converse(llm, conversation) for conversation in conversations]
    out.write_text(json.dumps(report, indent=1))


def run_in_fork(case: str, out: Path) -> int:
    """An engine can't be loaded twice in one process, and to import vLLM takes the longest."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run_case(case, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Run conversations through real engines.")
    parser.add_argument("cases", nargs="+", choices=sorted(CONVERSATIONS))
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm.entrypoints.llm  # noqa: F401

    codes = [run_in_fork(case, options.out / f"{case}.json") for case in options.cases]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
