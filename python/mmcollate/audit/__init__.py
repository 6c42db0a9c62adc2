"""Which placement flags of a model are right, found by running it with virtual devices.

:func:`audit` runs a model's forward on the CPU with real data. Its weights, and the batches of
fields that are not kept on the CPU, say that they are on ``cuda:0``; neither GPU nor driver is
needed. Whatever a GPU would have refused, waited for or copied is recorded with the line of the
model's own code, and each field gets a verdict.

>>> import torch
>>> from mmcollate import Batched, Flat
>>> from mmcollate.audit import audit
>>> class Encoder(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.proj = torch.nn.Linear(6, 4)
...
...     def forward(self, pixel_values, grid):
...         sizes = grid.prod(-1).tolist()
...         return self.proj(pixel_values).split(sizes)
>>> batch = {"pixel_values": torch.rand(10, 6), "grid": torch.tensor([[1, 2, 2], [1, 2, 3]])}
>>> report = audit(Encoder(), [batch], {"pixel_values": Flat(), "grid": Batched()})
>>> for field in report.fields:
...     print(field.field, field.verdict)
pixel_values right
grid could be kept

The same with ``grid=Batched(keep_on_cpu=True)``, or ``audit(…, keep_on_cpu={"grid": True})``, calls
both right.

A method is given as it is, and its object's weights go to the device; of any other function it is
named whose weights it uses: ``audit(model.get_image_features, …)``,
``audit(lambda **batch: …, …, modules=[model])``, with ``modules=[]`` if there are none.
Batches are mappings, or triples of modality, number of items and mapping, as
:func:`mmcollate.collate_groups` and vLLM's ``group_and_batch_mm_kwargs`` give them; ``fields`` then
may be a mapping by modality.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmcollate._core import __version__
from mmcollate.audit import weights
from mmcollate.audit.cuda import virtual_cuda
from mmcollate.audit.findings import (
    Event,
    EventKind,
    FieldKind,
    FieldReport,
    ModelReport,
    Site,
    Verdict,
)
from mmcollate.audit.interception import Interception
from mmcollate.audit.observe import Recorder, raised_at
from mmcollate.audit.results import tensors_in
from mmcollate.audit.rules import Memory
from mmcollate.audit.session import Session
from mmcollate.audit.virtual import VirtualTensor
from mmcollate.errors import (
    CollateKeyError,
    CollateRuntimeError,
    CollateTypeError,
    CollateValueError,
    describe,
    where,
)
from mmcollate.fields import Batched, Field, Flat, Shared
from mmcollate.reference import iter_leaves, map_leaves

__all__ = [
    "Event",
    "EventKind",
    "FieldKind",
    "FieldReport",
    "ModelReport",
    "Site",
    "Verdict",
    "audit",
]

Batch: TypeAlias = Mapping[str, Any]
Fields: TypeAlias = Mapping[str, Field]

_KINDS: dict[type[Field], FieldKind] = {Batched: "batched", Flat: "flat", Shared: "shared"}

_running = threading.Lock()
_runs_in: int | None = None


def audit(
    forward: Callable[..., Any],
    batches: Iterable[Batch | tuple[str | None, int, Batch]],
    fields: Fields | Mapping[str, Fields],
    *,
    modality: str = "",
    keep_on_cpu: Mapping[str, bool] | None = None,
    modules: Sequence[torch.nn.Module] | None = None,
    attributes: bool = False,
    name: str | None = None,
) -> ModelReport:
    """Runs a model on batches as if on a GPU, and judges the placement of each field.

    The model and the batches are as before afterwards, also if the forward raises: it works on
    copies of the batches' tensors and arrays, and puts back all that the modules hold, however deep
    in containers and objects. The modules' classes, with the globals beside these and the objects
    of the same package in them, are put back if a tensor came there, went or changed. What the
    forward stores elsewhere stays, its tensors as tensors of the CPU; those that were made on the
    device and stem from no field, as tables that helpers remember, are there again in the next
    audit. torch's random numbers come from a copy of its generator's state. Gradients are off. What
    a device refuses is recorded and not raised, so a model's own answer to it
    (``except TypeError:``) does not run. In threads that the forward starts, what is made there
    without a tensor is not placed. Only one audit runs at a time in a process; other threads wait,
    and see ``torch.cuda`` answer as with one GPU.

    Args:
        forward: A module, a method of one, or any callable; called with a batch's fields as
            keyword arguments.
        batches: What the forward gets, on the CPU whatever the flags say: from field name to
            tensor, number, string, or list, tuple or dict of such.
        fields: What each field is, its flag included; or the same by modality. A field that no
            batch has is left out of the report.
        modality: Of the batches that come without one.
        keep_on_cpu: Flags to try in place of the fields' own.
        modules: Whose weights are on the device; by default ``forward`` itself, or the module
            whose method it is. Of any other function they have to be named; ``[]`` says that it
            uses none.
        attributes: Whether tensors and modules that are plain attributes, or in containers and
            dataclasses among these, are on the device too, and devices among the attributes name
            it: as in engines that build their models there. ``Module.to`` leaves all as it is.
        name: Of the model, for the report.

    Returns:
        One report for each field of each modality, in the order of the batches, and what concerns
        no field. An exception of the forward is in ``error``; the next batch is run all the same.

    Raises:
        CollateKeyError: A batch has a field that ``fields`` does not have, or a flag is for none.
        CollateTypeError: ``forward``, a batch, a field or a weight is of no such type,
            ``forward`` is async, or a module is compiled by ``torch.jit``.
        CollateValueError: There is no batch, something is not on the CPU, or ``modules`` is left
            out where ``forward`` does not say whose weights it uses.
        CollateRuntimeError: Called by a forward that is being audited.
    """
    if not callable(forward):
        raise CollateTypeError(f"forward is {describe(forward)}, expected a module or a callable")
    if _is_async(forward):
        raise CollateTypeError(
            "forward is async: nothing of it would run; give a function that runs it,"
            " lambda **batch: asyncio.run(model(**batch))"
        )
    runs = _checked_runs(batches, fields, modality, keep_on_cpu or {})
    modules = _modules_of(forward) if modules is None else _checked_modules(modules)
    recorders = {run.modality: Recorder(boundary=_call.__code__) for run in runs}
    errors: dict[str, str] = {}
    with _alone():
        session = Session()
        try:
            for run in runs:
                session.start(recorders[run.modality], run.device_fields)
                try:
                    _run(session, forward, run, modules, attributes)
                except _Failed as failed:
                    errors.setdefault(run.modality, failed.described(run.modality))
        finally:
            session.end()
    return ModelReport(
        model=name or _name_of(forward, modules),
        fields=tuple(_reports(runs, recorders, errors)),
        other_events=tuple(
            event
            for known, recorder in recorders.items()
            for event in recorder.other_events(
                name for run in runs if run.modality == known for name in run.fields
            )
        ),
        num_forwards=len(runs),
        versions=_versions(modules),
        error="\n".join(errors.values()) or None,
    )


# Arguments


class _Run(NamedTuple):
    """One forward."""

    modality: str
    batch: dict[str, Any]
    fields: dict[str, Field]
    """Of this batch, with the flags that are tried."""

    @property
    def device_fields(self) -> frozenset[str]:
        """Those that are not kept."""
        return frozenset(name for name, x in self.fields.items() if not x.keep_on_cpu)


def _checked_runs(
    batches: Any, fields: Any, modality: str, flags: Mapping[str, bool]
) -> list[_Run]:
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise CollateTypeError(
            f"batches are {describe(batches)}, expected an iterable of batches; put a single one"
            " into a list"
        )
    if not isinstance(flags, Mapping) or not all(type(x) is bool for x in flags.values()):
        raise CollateTypeError(
            f"keep_on_cpu is {describe(flags)}, expected a mapping from field name to True or False"
        )
    if not isinstance(fields, Mapping):
        raise CollateTypeError(
            f"fields are {describe(fields)}, expected a mapping from field name to Batched, Flat or"
            " Shared, or such mappings by modality"
        )
    runs = [_checked_run(given, fields, modality, flags) for given in batches]
    if not runs:
        raise CollateValueError("no batch: nothing would be run")
    for name in flags:
        if not any(name in run.fields for run in runs):
            raise CollateKeyError(f"keep_on_cpu has {name!r}, which no batch has", field=name)
    return runs


def _checked_run(given: Any, fields: Any, modality: str, flags: Mapping[str, bool]) -> _Run:
    batch = given
    if isinstance(given, tuple) and len(given) == 3:
        modality, batch = given[0] if given[0] is not None else modality, given[2]
    if not isinstance(batch, Mapping):
        raise CollateTypeError(
            f"{where(modality or None, None)}: a batch is {describe(batch)}, expected a mapping"
            " from field name to value",
            modality=modality,
        )
    known = fields
    if isinstance(next(iter(fields.values()), None), Mapping):
        known = fields.get(modality, {})
    own = {name: _checked_field(name, known, modality, flags) for name in batch}
    for name, value in batch.items():
        for leaf in iter_leaves(value):
            if isinstance(leaf, torch.Tensor) and not leaf.is_cpu:
                raise CollateValueError(
                    f"{where(modality or None, name)}: {describe(leaf)}; give batches on the CPU,"
                    " the audit places them itself",
                    modality=modality,
                    field=name,
                )
    return _Run(modality, dict(batch), own)


def _checked_field(
    name: str, known: Mapping[str, Any], modality: str, flags: Mapping[str, bool]
) -> Field:
    at = where(modality or None, name)
    if name not in known:
        raise CollateKeyError(
            f"{at}: not in fields; say what it is, Batched, Flat or Shared",
            modality=modality,
            field=name,
        )
    field: Field = known[name]
    if type(field) not in _KINDS:
        raise CollateTypeError(
            f"{at}: {describe(field)}, expected Batched, Flat or Shared",
            modality=modality,
            field=name,
        )
    return dataclasses.replace(field, keep_on_cpu=flags.get(name, field.keep_on_cpu))


def _is_async(forward: Any) -> bool:
    function = _of_partial(forward)
    if isinstance(function, torch.nn.Module):
        function = function.forward
    candidates = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(x) or inspect.isasyncgenfunction(x) for x in candidates)


def _of_partial(forward: Any) -> Any:
    """The function behind ``functools.partial``."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return forward


def _checked_modules(modules: Any) -> list[torch.nn.Module]:
    if isinstance(modules, torch.nn.Module) or not isinstance(modules, Iterable):
        raise CollateTypeError(f"modules are {describe(modules)}, expected a list of modules")
    found = list(modules)
    for module in found:
        if not isinstance(module, torch.nn.Module):
            raise CollateTypeError(f"modules have {describe(module)}, expected modules alone")
    return found


def _modules_of(forward: Any) -> list[torch.nn.Module]:
    function = _of_partial(forward)
    if isinstance(function, torch.nn.Module):
        return [function]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return [owner]
    raise CollateValueError(
        f"forward is {describe(forward)}, which does not say whose weights it uses; name them,"
        " modules=[model], or that there are none, modules=[]"
    )


# Runs


class _Failed(Exception):
    """The forward's own exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def described(self, modality: str) -> str:
        """For the report."""
        of = f"{modality}: " if modality else ""
        site = raised_at(self.error)
        at = "" if site is None else f" at {site.file}:{site.line}"
        what = str(self.error) or ("no message" if site is None else site.source)
        return f"{of}{type(self.error).__name__}{at}: {what}"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other audit runs in this process."""
    global _runs_in
    if _runs_in == threading.get_ident():
        raise CollateRuntimeError("an audit is running here; a forward can't start another one")
    with _running:
        _runs_in = threading.get_ident()
        try:
            yield
        finally:
            _runs_in = None


def _make_tables_of_dynamo() -> None:
    """What is compiled later goes by tables of torch's functions: these have the real ones."""
    try:
        from torch._dynamo import trace_rules
    except ImportError:
        return  # it needs packages that torch itself does not
    trace_rules.get_torch_obj_rule_map()


def _run(
    session: Session,
    forward: Callable[..., Any],
    run: _Run,
    modules: Sequence[torch.nn.Module],
    attributes: bool,
) -> None:
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        # Without a driver, indexing what says it is on CUDA fails otherwise.
        torch._C._ensureCUDADeviceGuardSet()
    _make_tables_of_dynamo()
    with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
        batch = {name: _placed(session, name, run) for name in run.batch}
        stack.enter_context(_same_defaults())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # Without kernels that only GPUs have.
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(weights.on_device(session, modules, attributes=attributes))
        stack.enter_context(virtual_cuda(session))
        stack.enter_context(Interception(session))
        stack.enter_context(session.active())
        try:
            results = _call(forward, batch)
        except Exception as error:
            session.rules.failed(error)
            raise _Failed(error) from error
        for tensor in results:
            session.leaves(tensor, "result")


@contextlib.contextmanager
def _same_defaults() -> Iterator[None]:
    """torch's default dtype and device are as before afterwards."""
    dtype, context = torch.get_default_dtype(), _default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if _default_device() is not context:
            torch.set_default_device(None if context is None else context.device)


def _default_device() -> Any:
    """The mode that stands for it; none if it was never set."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _call(forward: Callable[..., Any], batch: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors in the result. The frame is the boundary between the caller's code and the
    model's."""
    return list(tensors_in(forward(**batch)))


def _placed(session: Session, name: str, run: _Run) -> Any:
    """A field's batch as virtual tensors, of copies; numpy's arrays copied too."""
    on_device = not run.fields[name].keep_on_cpu
    made: dict[int, Any] = {}

    def place(leaf: Any) -> Any:
        if id(leaf) not in made:
            made[id(leaf)] = _placed_leaf(session, name, leaf, on_device)
        return made[id(leaf)]

    return map_leaves(place, run.batch[name])


def _placed_leaf(session: Session, name: str, leaf: Any, on_device: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf) if hasattr(leaf, "__array_interface__") else leaf
    held = leaf.detach().clone()
    if leaf.layout is not torch.strided or leaf.is_nested:
        return held
    tensor = VirtualTensor.of(session, held.as_subclass(torch.Tensor), Memory(on_device, {name}))
    tensor.field_name = name
    return tensor


# The report


def _reports(
    runs: Sequence[_Run], recorders: Mapping[str, Recorder], errors: Mapping[str, str]
) -> Iterator[FieldReport]:
    values: dict[tuple[str, str], list[Any]] = {}
    declared: dict[tuple[str, str], Field] = {}
    for run in runs:
        for name, value in run.batch.items():
            values.setdefault((run.modality, name), []).append(value)
            declared[run.modality, name] = run.fields[name]
    for (modality, name), batches in values.items():
        field = declared[modality, name]
        tensors = [x for x in iter_leaves(batches) if isinstance(x, torch.Tensor)]
        yield recorders[modality].report(
            modality,
            name,
            _KINDS[type(field)],
            keep_on_cpu=field.keep_on_cpu,
            num_bytes=sum(x.nbytes for x in tensors if x.layout is torch.strided),
            has_tensors=bool(tensors),
            complete=modality not in errors,
        )


def _name_of(forward: Any, modules: Sequence[torch.nn.Module]) -> str:
    if modules:
        return type(modules[0]).__name__
    function = _of_partial(forward)
    return getattr(function, "__qualname__", type(function).__name__).replace("<locals>.", "")


def _versions(modules: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Of what took part: the packages of the models' classes too."""
    found = {
        "mmcollate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for module in modules:
        package = type(module).__module__.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", None)
        if isinstance(version, str):
            found[package] = version
    return found
