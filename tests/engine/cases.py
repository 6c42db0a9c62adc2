"""What is run: a tiny model, the requests, the engine's arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..tiny_models import FAMILIES, Request, qwen25vl


@dataclass(frozen=True)
class Case:
    model: str
    make_requests: Callable[[np.random.Generator], list[Request]]
    engine_args: dict[str, Any]


CASES = {name: Case(name, f.make_requests, f.ENGINE_ARGS) for name, f in FAMILIES.items()} | {
    "qwen25vl_embeds": Case("qwen25vl", qwen25vl.make_embeds_requests, qwen25vl.EMBEDS_ENGINE_ARGS),
    "transformers_llavanext": Case(
        "llavanext",
        FAMILIES["llavanext"].make_requests,
        FAMILIES["llavanext"].ENGINE_ARGS | {"model_impl": "transformers"},
    ),
}
