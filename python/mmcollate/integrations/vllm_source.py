"""Which vLLM this is: whether its batcher is one that mmcollate is known to match."""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

KNOWN: dict[str, str] = {"905eb5f9ab06ed96": "0.30.0 to 0.32.0"}
"""Fingerprint of the replaced code, and of all that it reads and calls, to the versions that have
it."""


def version() -> str:
    """vLLM's version, also of a build that is distributed under another name."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def problem(replaced: Iterable[Callable[..., Any]]) -> str:
    """Why this vLLM is not one that mmcollate knows; empty if it is.

    Args:
        replaced: The functions that would be replaced, as they are in vLLM now.
    """
    try:
        computed = _computed()
        found = fingerprint(replaced)
    except (ImportError, AttributeError, KeyError, OSError, SyntaxError, TypeError) as error:
        return f"vLLM {version()} is unknown ({type(error).__name__}: {error})"
    if computed:
        return f"vLLM {version()} is unknown: {computed} is not what it was"
    if found not in KNOWN:
        return f"vLLM {version()} is unknown: its batcher has the fingerprint {found}"
    return ""


_MAPPING = ("__getitem__", "__iter__", "__contains__", "__len__", "keys", "items", "values")


def _computed() -> str:
    """What the core reads as a plain attribute or dict entry, but code computes."""
    utils = importlib.import_module("vllm.multimodal.utils")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    item, element = inputs.MultiModalKwargsItem, inputs.MultiModalFieldElem
    for name in _MAPPING:
        if inspect.getattr_static(item, name) is not inspect.getattr_static(UserDict, name):
            return f"{item.__name__}.{name}"
    kinds = _kinds(inputs)
    plain = [(item, "data"), (element, "data"), (element, "field")]
    plain += [(kind, "keep_on_cpu") for kind in kinds] + [(inputs.MultiModalFlatField, "dim")]
    for owner, name in plain:
        # A dataclass has the default of a field here.
        found = inspect.getattr_static(owner, name, None)
        if hasattr(type(found), "__get__") or hasattr(type(found), "__set__"):
            return f"{owner.__name__}.{name}"
    for owner in (item, element, *kinds):
        found = inspect.getattr_static(owner, "__getattribute__")
        if found is not object.__getattribute__:
            return f"{owner.__name__}.__getattribute__"
        if inspect.getattr_static(owner, "__getattr__", None) is not None:
            return f"{owner.__name__}.__getattr__"
    if [field.name for field in dataclasses.fields(element)] != ["data", "field"]:
        return f"what {element.__name__} has as fields"
    if utils.MultiModalSharedField is not inputs.MultiModalSharedField:
        return "utils.MultiModalSharedField"
    return ""


def fingerprint(replaced: Iterable[Callable[..., Any]]) -> str:
    """A hash of the code that decides what a batch is; comments, docstrings and annotations don't
    count, nor does the Python that reads it."""
    files: dict[str, dict[int | str, ast.AST]] = {}
    code = hashlib.sha256()
    inputs = importlib.import_module("vllm.multimodal.inputs")
    classes = (inputs.MultiModalKwargsItem, inputs.MultiModalFieldElem)
    for part in (*replaced, *_deciding_functions(), *classes, *_kinds(inputs)):
        path, key = _place(part)
        if path not in files:
            files[path] = _definitions(Path(path).read_text(encoding="utf-8"))
        code.update(_canonical(files[path][key]).encode())
    return code.hexdigest()[:16]


def _place(part: Any) -> tuple[str, int | str]:
    """A function's or a class's file, and what it goes by in there."""
    if isinstance(part, type):
        return str(sys.modules[part.__module__].__file__), part.__qualname__
    return part.__code__.co_filename, part.__code__.co_firstlineno


def _definitions(source: str) -> dict[int | str, ast.AST]:
    """A module's functions, by the line that a code object names as its first, and its classes,
    by name."""
    found: dict[int | str, ast.AST] = {}
    todo = [("", node) for node in ast.parse(source).body]
    for within, node in todo:
        if isinstance(node, ast.ClassDef):
            found[within + node.name] = node
            todo += [(f"{within}{node.name}.", inner) for inner in node.body]
        elif isinstance(node, ast.FunctionDef):
            found[min([node.lineno, *(d.lineno for d in node.decorator_list)])] = node
    return found


def _kinds(inputs: ModuleType) -> tuple[type, ...]:
    return (
        inputs.BaseMultiModalField,
        inputs.MultiModalBatchedField,
        inputs.MultiModalFlatField,
        inputs.MultiModalSharedField,
    )


def _deciding_functions() -> Iterator[Callable[..., Any]]:
    utils = importlib.import_module("vllm.multimodal.utils")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    jsontree = importlib.import_module("vllm.utils.jsontree")
    yield utils._can_batch_mm_items
    # One name may have been patched in one module only.
    for module in (utils, inputs):
        yield module.nested_tensors_equal
    for module in (inputs, jsontree):
        yield module.json_map_leaves
        yield module.json_iter_leaves
    yield inputs.is_list_of
    yield inputs._nested_tensors_are_cpu
    yield inputs._nested_tensors_h2d
    yield inputs._is_dense
    for kind in _kinds(inputs):
        yield kind.reduce_data  # type: ignore[attr-defined]
        yield kind._reduce_data  # type: ignore[attr-defined]


_MAKERS = ("build_elems", "_field_factory", "dummy", "get_data")
"""Methods that have no part in batching."""


def _canonical(node: Any) -> str:
    """An abstract syntax tree as text that is the same from every Python version: only what is
    set, and nothing that does not run."""
    if isinstance(node, list):
        return "[" + ",".join(map(_canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "ctx", "kind", "type_params"):
            continue
        kept = value
        if name == "body" and isinstance(value, list):
            kept = [inner for inner in value if not _is_idle(inner, node)]
        if kept is not None and kept != []:
            parts.append(f"{name}={_canonical(kept)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_idle(node: ast.AST, owner: ast.AST) -> bool:
    """Whether a statement is a mere string, or a method without a part in batching."""
    if isinstance(node, ast.FunctionDef) and isinstance(owner, ast.ClassDef):
        return node.name in _MAKERS
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def sample_batches() -> Iterator[tuple[str, list[Any]]]:
    """Small batches of every kind, in vLLM's classes, for the check at activation."""
    inputs = importlib.import_module("vllm.multimodal.inputs")
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=generator, dtype=dtype, device="cpu")

    def real(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return values.to(torch.bfloat16)

    def batch(field: Any, *values: Any) -> list[Any]:
        elems = [inputs.MultiModalFieldElem(data=value, field=field) for value in values]
        return [inputs.MultiModalKwargsItem({"x": elem}) for elem in elems]

    batched = inputs.MultiModalBatchedField()
    kept = inputs.MultiModalBatchedField(keep_on_cpu=True)
    flat = inputs.MultiModalFlatField(slices=[])
    flat1 = inputs.MultiModalFlatField(slices=[], dim=1)
    shared = inputs.MultiModalSharedField(batch_size=1)
    grid = whole(3)
    yield "batched", batch(batched, whole(3), whole(3))
    yield "kept", batch(kept, whole(3), whole(3), whole(3))
    yield "kept scalars", batch(kept, real(), real())
    yield "strided", batch(batched, real(4, 3).t(), real(3, 4))
    yield "bytes", batch(batched, whole(5, dtype=torch.uint8), whole(5, dtype=torch.uint8))
    yield "ragged", batch(batched, real(2, 3), real(4, 3))
    yield "numbers", batch(kept, 1.5, 2)
    yield "casts", batch(batched, real(3), real(3).float())
    yield "flat", batch(flat, real(2, 3), real(5, 3), real(0, 3))
    yield "flat dim 1", batch(flat1, real(3, 7)[:, :4], real(3, 2))
    yield "padded", batch(flat, real(2, 3), real(1, 5))
    yield "lists", batch(flat, [real(2), real(3)], [real(1)])
    yield "shared", batch(shared, grid, grid.clone(), whole(3))
    two = [*batch(kept, grid), *batch(kept, grid)]
    two[1]["y"] = two[0]["x"]
    yield "other fields", two
