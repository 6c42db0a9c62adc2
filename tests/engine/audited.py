"""Audits of real engines' models: as they are, and with each field's flag the other way round.

    python -m tests.engine.audited

is asked over stdin for one case after the other, as `forks` is, and runs each in a fork of its own,
after one import of vLLM. The case is loaded once, and audited on made-up requests and on its own.
"""

import dataclasses
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mmcollate import cli
from mmcollate.audit import report
from mmcollate.audit import vllm as audits
from mmcollate.audit.findings import ModelReport

from ..tiny_models import build
from ..tiny_models.weights import randomize
from . import forks
from .cases import CASES, Case
from .process import ENVIRONMENT


def load(case: Case) -> Any:
    """An engine as the command loads it."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: randomize(model)
    folder = str(build(case.model))
    return audits.load(folder, load_format="dummy", dtype="bfloat16", **case.engine_args)


def main(arguments: list[str]) -> None:
    """Does what is asked: `case NAME OUT` or `command OUT ARGUMENT ...`."""
    # The kernels can hang where no signal is handled; this ends the process even there.
    faulthandler.dump_traceback_later(170, exit=True)
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    what, *rest = arguments
    {"case": audit_case, "command": run_command}[what](*rest)


def audit_case(name: str, out: str) -> None:
    """Writes the reports of one case as JSON: `stock`, by flipped field `flips`, and `again`.

    Flips run on the case's own requests, one modality at a time; and the model as it is, before
    and after them, on the first one.
    """
    case = CASES[name]
    llm = load(case)
    model = audits.model_of(llm)
    own = audits.observe(llm, [case.make_requests(np.random.default_rng(0))])
    seen = audits.observe(llm, audits.made_up_requests(llm))
    seen.batches += own.batches
    seen.prompts += own.prompts
    for modality, fields in own.fields.items():
        seen.fields.setdefault(modality, {}).update(fields)
    stock = audits.audit_seen(model, seen)
    first = only(own, own.batches[0][0])
    before = audits.audit_seen(model, first)
    flips = {
        f"{field.modality}/{field.field}": audits.audit_seen(
            model, only(own, field.modality), keep_on_cpu={field.field: not field.keep_on_cpu}
        )
        for field in stock.fields
        if any(field.field in batch for _, _, batch in own.batches)
    }
    found = {
        "stock": as_json(stock),
        "before": as_json(before),
        "flips": {name: as_json(x) for name, x in flips.items()},
        "again": as_json(audits.audit_seen(model, first)),
    }
    Path(out).write_text(json.dumps(found))


def only(seen: audits.Seen, modality: str) -> audits.Seen:
    """What was seen of one modality; prompts are whole."""
    batches = [batch for batch in seen.batches if batch[0] == modality]
    return dataclasses.replace(seen, batches=batches)


def as_json(made: ModelReport) -> Any:
    return json.loads(report.to_json([made]))


def run_command(out: str, *arguments: str) -> None:
    """Runs `mmcollate` here, and writes its exit code and what it printed where."""
    streams = [Path(f"{out}.{name}") for name in ("stdout", "stderr")]
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    code = cli.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = (stream.read_text() for stream in streams)
    Path(out).write_text(json.dumps({"code": code, "stdout": stdout, "stderr": stderr}))


if __name__ == "__main__":
    forks.driver = sys.modules[__name__]
    forks.serve()
