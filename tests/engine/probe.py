"""What is observed in the engine's process: the encoder's inputs and outputs, the plugin's state.

`LLM.apply_model` carries these functions there, also into a separate process.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch

Call = dict[str, Any]

_calls: list[Call] = []


def attach(model: Any) -> None:
    """From now on, note every call of the encoder."""
    embed = model.embed_multimodal

    def embed_multimodal(**fields: Any) -> Any:
        call: Call = {"fields": {name: describe(value) for name, value in fields.items()}}
        outputs = embed(**fields)
        call["outputs"] = [describe(output) for output in outputs]
        _calls.append(call)
        return outputs

    model.embed_multimodal = embed_multimodal


def take_calls(model: Any) -> list[Call]:
    """The calls since the last time."""
    calls, _calls[:] = list(_calls), []
    return calls


def take_plugin(model: Any = None) -> dict[str, Any]:
    """The state of mmcollate in this process, and its counters since the last time."""
    import mmcollate
    from mmcollate.integrations import vllm as plugin

    state = {
        "pid": os.getpid(),
        "active": plugin.is_active(),
        "status": plugin.status(),
        "stats": mmcollate.stats(),
    }
    mmcollate.reset_stats()
    return state


def describe(value: Any) -> Any:
    """Type, shape, place and content, short enough to be compared as JSON."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(raw.tobytes()).hexdigest()[:16]
        return f"{value.dtype} {list(value.shape)} {value.device} {digest}"
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(describe, value)]
    return f"{type(value).__name__} {value!r}"


@contextlib.contextmanager
def one_byte_flipped() -> Iterator[None]:
    """Flip one byte of the first batch that is made for the encoder, in its largest data tensor."""
    from vllm.multimodal import utils

    collate = utils.group_and_batch_mm_items
    planted = False

    def faulty(items: Any, **options: Any) -> Iterator[Any]:
        nonlocal planted
        for count, batch in collate(items, **options):
            # Without a device it is the processor that asks, to read counts.
            if not planted and options.get("device") is not None:
                _flip_one_byte(batch)
                planted = True
            yield count, batch

    utils.group_and_batch_mm_items = faulty
    try:
        yield
    finally:
        utils.group_and_batch_mm_items = collate
    assert planted, "no batch was made"


def _flip_one_byte(batch: dict[str, Any]) -> None:
    container, key = max(_data_tensors(batch), key=lambda place: place[0][place[1]].nbytes)
    tensor = container[key].clone(memory_format=torch.contiguous_format)
    # The second byte holds the exponent of a bfloat16, so that a zero changes visibly too.
    tensor.view(-1).view(torch.uint8)[1] ^= 0x40
    container[key] = tensor


def _data_tensors(container: Any) -> Iterator[tuple[Any, Any]]:
    places = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in places:
        if isinstance(value, torch.Tensor):
            # Not the integers: counts would crash the model, and masks hide the change.
            if value.is_floating_point() or value.dtype == torch.uint8:
                yield container, key
        elif isinstance(value, list):
            yield from _data_tensors(value)
