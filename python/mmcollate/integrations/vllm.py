"""vLLM's batcher, replaced without an edit there.

Two functions of ``vllm.multimodal.utils`` are exchanged: ``group_and_batch_mm_items`` and
``_batch_mm_items``. Both are looked up when they are called, so that every caller is served, also
those imported before. vLLM loads :func:`register` in each of its processes, through the entry
point group ``vllm.general_plugins``. What the core does not do exactly, field by field, goes to
vLLM's own ``reduce_data``, with vLLM's own exceptions.
"""

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import mmcollate
from mmcollate import _core, bits, config, errors
from mmcollate.collation import warn_if_slow
from mmcollate.integrations import vllm_source
from mmcollate.torch_modes import only_device_contexts

_NAMES = ("group_and_batch_mm_items", "_batch_mm_items")

_lock = threading.RLock()
_state = "not activated in this process"
_installed: dict[str, Callable[..., Any]] = {}
_unsaid: Callable[[], None] | None = None
"""The log line, if nobody could have heard it at activation; said with the first batch."""


@dataclass(frozen=True)
class Originals:
    """vLLM's own functions."""

    group_and_batch_mm_items: Callable[..., Iterator[tuple[int, dict[str, Any]]]]
    _batch_mm_items: Callable[..., dict[str, Any]]


def register() -> None:
    """Entry point: activates, and says so in one line of vLLM's log. Never raises."""
    try:
        from vllm.logger import init_logger

        logger = init_logger("vllm.plugins.mmcollate")
        if config.disabled():
            _set_state("MMCOLLATE_DISABLE is set")
            logger.info("mmcollate is off: %s", _state)
        elif activate():
            global _unsaid
            line = f"mmcollate {mmcollate.__version__} is active: {_state}"
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", line)
            else:
                # vLLM's front end loads plugins before it sets up its log.
                _unsaid = functools.partial(logger.info, "%s", line)
        else:
            logger.warning("mmcollate is off: %s", _state)
    except Exception as error:  # vLLM would die of it
        _set_state(f"{type(error).__name__}: {error}")


def _say_once() -> None:
    global _unsaid
    say, _unsaid = _unsaid, None
    if say is not None:
        say()


def activate() -> bool:
    """Puts mmcollate in the place of vLLM's batcher, after a self-check; idempotent.

    Returns:
        Whether it is active now. If not, :func:`status` says why: an unknown vLLM, or a difference
        that the self-check found.
    """
    with _lock:
        if is_active():
            return True
        if _installed:
            _set_state("replaced by another patch on top of mmcollate's")
            return False
        utils = _utils()
        if any(getattr(utils, name) is not known for name, known in _replaced().items()):
            # Someone has patched vLLM since these were looked up.
            _replaced.cache_clear()
            originals.cache_clear()
        try:
            problem = vllm_source.problem(_replaced().values()) or _uncounted_self_check()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            _set_state(problem)
            return False
        pair = (
            (_verified_group_and_batch_mm_items, _verified_batch_mm_items)
            if config.verify()
            else (group_and_batch_mm_items, batch_mm_items)
        )
        for name, ours in zip(_NAMES, pair, strict=True):
            # The original's name, module and signature: pickles by reference, reads alike.
            functools.update_wrapper(ours, _replaced()[name])
            setattr(utils, name, ours)
            _installed[name] = ours
        how = "exchange table" if collator().has_exchange_table else "Python attributes"
        _set_state(
            f"vLLM {vllm_source.version()}, torch tensors read through the {how}"
            + (", every batch verified against vLLM's own" if config.verify() else "")
        )
        return True


def deactivate() -> bool:
    """Puts vLLM's own functions back; idempotent.

    Returns:
        Whether mmcollate is out of the way now. It is not if someone else has since replaced what
        was installed here: their function is left alone.
    """
    with _lock:
        if not _installed:
            return True
        utils = _utils()
        if any(getattr(utils, name) is not ours for name, ours in _installed.items()):
            _set_state("replaced by another patch on top of mmcollate's")
            return False
        for name in _installed:
            setattr(utils, name, _replaced()[name])
        _installed.clear()
        _set_state("deactivated")
        return True


def is_active() -> bool:
    """Whether vLLM's batches go through mmcollate in this process."""
    if not _installed:
        return False
    utils = _utils()
    return all(getattr(utils, name) is ours for name, ours in _installed.items())


def status() -> str:
    """Why it is active, or why not."""
    return _state


def _set_state(state: str) -> None:
    global _state
    _state = state


def _utils() -> ModuleType:
    return importlib.import_module("vllm.multimodal.utils")


@functools.cache
def _replaced() -> dict[str, Callable[..., Any]]:
    """The functions that `activate` replaces and `deactivate` puts back."""
    utils = _utils()
    return {name: getattr(utils, name) for name in _NAMES}


@functools.cache
def originals() -> Originals:
    """vLLM's own functions, whether or not they are replaced.

    The generator looks the other function up in its module when it is called. So that it finds
    vLLM's there and not what replaced it, these are copies with a namespace of their own.
    """
    namespace = dict(vars(_utils()))
    for name, function in _replaced().items():
        assert isinstance(function, FunctionType)
        own = FunctionType(function.__code__, namespace, name, function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__
        namespace[name] = functools.update_wrapper(own, function)
    return Originals(*(namespace[name] for name in _NAMES))


@functools.cache
def collator() -> _core.Collator:
    """The core for vLLM's items."""
    inputs = importlib.import_module("vllm.multimodal.inputs")
    core = _core.Collator.of_elements(
        item=inputs.MultiModalKwargsItem,
        element=inputs.MultiModalFieldElem,
        batched=inputs.MultiModalBatchedField,
        flat=inputs.MultiModalFlatField,
        shared=inputs.MultiModalSharedField,
        reduce=_reduce,
        can_batch=_can_batch,
        only_device_contexts=only_device_contexts,
        skip_table=config.skip_exchange_table(),
    )
    warn_if_slow(core)
    return core


def _reduce(
    name: str,
    field: Any,
    elems: list[Any],
    device: Any,
    pin_memory: bool,
    reason: str,
    context: None,
) -> Any:
    try:
        return elems[0].field.reduce_data(elems, device=device, pin_memory=pin_memory)
    except Exception as error:
        item, advice = errors.diagnose(field, [elem.data for elem in elems])
        errors.add_note(error, f"mmcollate: {errors.where(None, name, item)}: {advice}")
        raise


def _can_batch(left: Any, right: Any, fields: None, context: None) -> bool:
    return bool(_utils()._can_batch_mm_items(left, right))


def group_and_batch_mm_items(
    items: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """In the place of ``vllm.multimodal.utils.group_and_batch_mm_items``."""
    if _unsaid is not None:
        _say_once()
    stop = len(items)
    if type(items) is not list and type(items) is not tuple:
        yield from originals().group_and_batch_mm_items(items, device=device, pin_memory=pin_memory)
        return
    core = collator()
    start = 0
    while start < stop:
        end, batch = core.next_group(items, start, stop, None, device, pin_memory, None)
        if batch is None:
            batch = originals()._batch_mm_items(
                items[start:end], device=device, pin_memory=pin_memory
            )
        yield end - start, batch
        start = end
    assert start == len(items)


def batch_mm_items(
    items: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> dict[str, Any]:
    """In the place of ``vllm.multimodal.utils._batch_mm_items``."""
    if _unsaid is not None:
        _say_once()
    if type(items) is list or type(items) is tuple:
        batch = collator().batch(items, device, pin_memory)
        if batch is not None:
            return batch
    return originals()._batch_mm_items(items, device=device, pin_memory=pin_memory)


def _verified_group_and_batch_mm_items(
    items: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    ours = group_and_batch_mm_items(items, device=device, pin_memory=pin_memory)
    theirs = originals().group_and_batch_mm_items(items, device=device, pin_memory=pin_memory)
    while True:
        group = _verified(lambda: next(ours, None), lambda: next(theirs, None))
        if group is None:
            return
        yield group


def _verified_batch_mm_items(
    items: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> dict[str, Any]:
    batch: dict[str, Any] = _verified(
        lambda: batch_mm_items(items, device=device, pin_memory=pin_memory),
        lambda: originals()._batch_mm_items(items, device=device, pin_memory=pin_memory),
    )
    return batch


def _verified(ours: Callable[[], Any], theirs: Callable[[], Any]) -> Any:
    """Ours, if both give the same result or the same exception."""
    expected, raised = _outcome(theirs)
    result, error = _outcome(ours)
    if error is not None and (type(error), str(error)) == (type(raised), str(raised)):
        raise error
    if error is not None or raised is not None:
        raise errors.VerificationError(
            f"mmcollate gave {error or 'a batch'!r}, vLLM {raised or 'a batch'!r}"
        ) from (error or raised)
    found = bits.first_difference(result, expected, "batch")
    if found is not None:
        raise errors.VerificationError(f"mmcollate differs from vLLM at {found}")
    return result


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _uncounted_self_check() -> str:
    """The self-check, without a trace in the counters if nothing was counted before."""
    unused = mmcollate.stats()["batches"] == 0
    problem = _self_check()
    if unused:
        mmcollate.reset_stats()
    return problem


def _self_check() -> str:
    """What is wrong, if a small fixed set of batches comes out otherwise than from vLLM."""
    for name, items in vllm_source.sample_batches():
        for device in (None, "cpu"):
            ours = list(group_and_batch_mm_items(items, device=device))
            theirs = list(originals().group_and_batch_mm_items(items, device=device))
            found = bits.first_difference(ours, theirs, name)
            found = found or bits.first_difference(
                batch_mm_items(items[:1], device=device),
                originals()._batch_mm_items(items[:1], device=device),
                name,
            )
            if found:
                return f"the self-check found a difference from vLLM at {found}"
    return ""
