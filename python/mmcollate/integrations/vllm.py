"""vLLM's batcher, replaced without an edit there.

Two functions of ``vllm.multimodal.utils`` are exchanged: ``group_and_batch_mm_items`` and
``_batch_mm_items``. Both are looked up when they are called, so that every caller is served, also
those imported before. vLLM loads :func:`register` in each of its processes, through the entry
point group ``vllm.general_plugins``. What the core does not do exactly, field by field, goes to
vLLM's own ``reduce_data``, with vLLM's own exceptions.
"""

import contextlib
import functools
import importlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import mmcollate
from mmcollate import _core, backends, bits, config, errors, staging
from mmcollate.backends import Backend
from mmcollate.collation import warn_if_slow
from mmcollate.integrations import vllm_source
from mmcollate.omitting import OMITTED
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
            _unsaid = functools.partial(logger.info, "%s", line)
            # vLLM's front end loads plugins before it sets up its log.
            if logger.isEnabledFor(logging.INFO):
                _say_once()
        else:
            logger.warning("mmcollate is off: %s", _state)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # vLLM would die of it; a panic in Rust is no Exception
        if not _installed:
            _set_state(_said(error))


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
    global _installed
    with _lock:
        if is_active():
            return True
        if _is_patched_on_top():
            if not _installed:
                _set_state(_ON_TOP)
            return False
        utils = _utils()
        for name in _installed:
            setattr(utils, name, _replaced()[name])
        _installed = {}
        if _has_others():
            # Someone has patched vLLM since these were looked up.
            _replaced.cache_clear()
            originals.cache_clear()
        try:
            config.check()
            problem = vllm_source.problem(_replaced().values()) or _self_check()
            state = "" if problem else _active_state()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            problem = _said(error)
        if problem:
            _set_state(problem)
            return False
        pair = (
            (_verified_group_and_batch_mm_items, _verified_batch_mm_items)
            if config.verify()
            else (group_and_batch_mm_items, batch_mm_items)
        )
        _installed = dict(zip(_NAMES, pair, strict=True))
        for name, ours in _installed.items():
            # The original's name, module and signature: pickles by reference, reads alike.
            functools.update_wrapper(ours, _replaced()[name])
            setattr(utils, name, ours)
        _set_state(state)
        return True


def _active_state() -> str:
    how = "exchange table" if collator().has_exchange_table else "Python attributes"
    verified = ", every batch verified against vLLM's own" if config.verify() else ""
    return f"vLLM {vllm_source.version()}, torch tensors read through the {how}{verified}"


def deactivate() -> bool:
    """Puts vLLM's own functions back; idempotent.

    Returns:
        Whether mmcollate is out of the way now. It is not if someone else has since replaced what
        was installed here: their function is left alone.
    """
    global _installed
    with _lock:
        if not _installed:
            return True
        if _is_patched_on_top():
            return False
        utils = _utils()
        for name in _installed:
            setattr(utils, name, _replaced()[name])
        _installed = {}
        _set_state("deactivated")
        return True


def is_active() -> bool:
    """Whether vLLM's batches go through mmcollate in this process."""
    installed = _installed
    return bool(installed) and _in_place() == installed


def status() -> str:
    """Why it is active, or why not."""
    if not _installed or is_active():
        return _state
    if _is_patched_on_top():
        return _ON_TOP
    return "vLLM's own functions were put back by another than mmcollate"


def _in_place() -> dict[str, Any]:
    """What vLLM's module has under the names that are replaced."""
    utils = _utils()
    return {name: getattr(utils, name, None) for name in _NAMES}


def _has_others() -> bool:
    """Whether a function is now neither mmcollate's nor the one that was there before."""
    ours = (*_OURS, *_installed.values())
    found = _in_place().items()
    return any(here not in ours and here is not _replaced()[name] for name, here in found)


def _is_patched_on_top() -> bool:
    """Whether someone's function is there now, and calls mmcollate's or stands beside it."""
    ours_is_there = any(here in _OURS for here in _in_place().values())
    return (bool(_installed) or ours_is_there) and _has_others()


_ON_TOP = "replaced by another patch on top of mmcollate's"


def _set_state(state: str) -> None:
    global _state
    _state = state


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: BaseException) -> str:
    """What the exception says, but not where in memory or in torch's own code."""
    try:
        text = str(error).split("\nException raised from")[0]
    except Exception:
        return "(no message)"
    return re.sub(r"\b0x[0-9a-f]+\b", "0x", text)


def _utils() -> ModuleType:
    return importlib.import_module("vllm.multimodal.utils")


@functools.cache
def _replaced() -> dict[str, Callable[..., Any]]:
    """The functions that `activate` replaces and `deactivate` puts back."""
    return _in_place()


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
def collator(*, counted: bool = True) -> _core.Collator:
    """The core for vLLM's items; one that is not counted leaves no trace in ``stats()``."""
    inputs = importlib.import_module("vllm.multimodal.inputs")
    config.tell_core()
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
        alias=not config.no_alias(),
        counted=counted,
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
    context: Any,
) -> Any:
    # Only of collate(); the plugin does what vLLM does.
    if context is not None:
        for row, elem in enumerate(elems):
            if elem.data is OMITTED:
                index = context.item(context.start + row)
                raise errors.omitted_value(context.modality, name, index)
    first = elems[0].field
    reduce = functools.partial(first.reduce_data, elems)
    try:
        if isinstance(device, Backend):
            keep = first.keep_on_cpu
            batch = device.reference(reduce, keep_on_cpu=keep, pin_memory=pin_memory)
        else:
            batch = reduce(device=device, pin_memory=pin_memory)
    except Exception as error:
        item, advice = errors.diagnose(field, [elem.data for elem in elems])
        errors.add_note(error, f"mmcollate: {errors.where(None, name, item)}: {advice}")
        raise
    if device is not None:
        backends.wait_for_host([elem.data for elem in elems], batch)
    return batch


def _can_batch(left: Any, right: Any, fields: None, context: None, at: int = 0) -> bool:
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
    if stop == 0:
        return
    core = collator()
    backend = staging.backend_for(device, pin_memory)
    staged = backend is not None
    start = 0
    while start < stop:
        try:
            end, batch, plan = core.next_group(
                items, start, stop, None, device, pin_memory, None, staged
            )
            if batch is None:
                batch = originals()._batch_mm_items(
                    items[start:end], device=device, pin_memory=pin_memory
                )
        except AttributeError as error:  # as of None
            errors.note_missing(error, items, start)
            raise
        if plan is not None and backend is not None:
            staging.Bound(plan, backend, None).send(batch)
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
        batch = _batch(collator(), items, device, pin_memory)
        if batch is not None:
            return batch
    try:
        return originals()._batch_mm_items(items, device=device, pin_memory=pin_memory)
    except AttributeError as error:  # as of None
        if type(items) is list or type(items) is tuple:
            errors.note_missing(error, items)
        raise


def _batch(
    core: _core.Collator, items: Sequence[Any], device: Any, pin_memory: bool
) -> dict[str, Any] | None:
    backend = staging.backend_for(device, pin_memory)
    batch, plan = core.batch(items, device, pin_memory, backend is not None)
    if batch is not None and plan is not None and backend is not None:
        staging.Bound(plan, backend, None).send(batch)
    return batch


def _verified_group_and_batch_mm_items(
    items: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    ours = group_and_batch_mm_items(items, device=device, pin_memory=pin_memory)
    if not _can_be_read_twice(items):
        yield from ours
        return
    theirs = originals().group_and_batch_mm_items(items, device=device, pin_memory=pin_memory)
    start = 0
    while True:
        group, expected = _both(lambda: next(ours, None), lambda: next(theirs, None))
        if group is None and expected is None:
            return
        count, batch = group or (0, {})
        wanted, right = expected or (0, {})
        if count != wanted:
            raise errors.VerificationError(
                f"from item {start} on, mmcollate made a batch of {count} items, vLLM of {wanted}"
            )
        _compare(batch, right, items[start : start + count])
        yield count, batch
        start += count


def _verified_batch_mm_items(
    items: Sequence[Any], *, device: Any = None, pin_memory: bool = False
) -> dict[str, Any]:
    if not _can_be_read_twice(items):
        return batch_mm_items(items, device=device, pin_memory=pin_memory)
    batch: dict[str, Any]
    batch, expected = _both(
        lambda: batch_mm_items(items, device=device, pin_memory=pin_memory),
        lambda: originals()._batch_mm_items(items, device=device, pin_memory=pin_memory),
    )
    _compare(batch, expected, items)
    return batch


def _can_be_read_twice(items: Sequence[Any]) -> bool:
    """Whether computing both ways uses nothing up: no iterators among the values."""
    if type(items) is not list and type(items) is not tuple:
        return False  # vLLM's own function does it anyway
    return not any(hasattr(type(value), "__next__") for value in bits.walk(_values(items)))


def _values(items: Sequence[Any]) -> list[Any]:
    """What the items hold, as far as they are mappings of elements."""
    values: list[Any] = []
    for item in items:
        with contextlib.suppress(Exception):
            if isinstance(item, Mapping):
                values += [elem.data for elem in item.values()]
    return values


def _both(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any]:
    """Both results. If both raise the same exception, it is raised: ours, for its notes."""
    expected, raised = _outcome(theirs)
    result, error = _outcome(ours)
    if error is None and raised is None:
        return result, expected
    if error is not None and raised is not None:
        same_type = type(error) is type(raised)
        if same_type and _message(error) == _message(raised):
            raise error
    raise errors.VerificationError(
        f"mmcollate {_described(error)}, vLLM {_described(raised)}"
    ) from (raised if error is None else error)


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _described(error: Exception | None) -> str:
    return "gave a batch" if error is None else f"raised {_said(error)}"


def _compare(batch: Any, expected: Any, items: Sequence[Any]) -> None:
    found = bits.first_difference(batch, expected, "batch", _values(items))
    if found is not None:
        raise errors.VerificationError(f"mmcollate differs from vLLM at {found}")


_OURS = (
    group_and_batch_mm_items,
    batch_mm_items,
    _verified_group_and_batch_mm_items,
    _verified_batch_mm_items,
)


def _groups(
    core: _core.Collator, items: Sequence[Any], device: Any
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The groups as the core alone makes them."""
    start, stop = 0, len(items)
    while start < stop:
        end, batch, _ = core.next_group(items, start, stop, None, device, False, None, False)
        yield end - start, batch
        start = end


def _self_check() -> str:
    """What is wrong, if a small fixed set of batches comes out otherwise than from vLLM."""
    core, theirs = collator(counted=False), originals()
    for name, items in vllm_source.sample_batches():
        for device in (None, "cpu"):
            pairs = [
                (
                    list(_groups(core, items, device)),
                    list(theirs.group_and_batch_mm_items(items, device=device)),
                ),
                (
                    _batch(core, items[:1], device, pin_memory=False),
                    theirs._batch_mm_items(items[:1], device=device),
                ),
            ]
            for ours, expected in pairs:
                found = bits.first_difference(ours, expected, name, _values(items))
                if found:
                    return f"the self-check found a difference from vLLM at {found}"
    return ""
