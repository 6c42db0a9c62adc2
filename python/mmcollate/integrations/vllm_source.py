"""Which vLLM this is: whether its batcher is one that mmcollate is known to match."""

import ast
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

KNOWN: dict[str, str] = {"bc32949b80c5c6be": "0.30.0 to 0.32.0"}
"""Fingerprint of the replaced code, and of all that it calls, to the versions that have it."""


def version() -> str:
    """vLLM's version, also of a build that is distributed under another name."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def problem(replaced: Iterable[Callable[..., Any]]) -> str:
    """Why this vLLM is not one that mmcollate knows; empty if it is.

    Args:
        replaced: The functions that would be replaced, as they are in vLLM now.
    """
    try:
        found = fingerprint(replaced)
    except (ImportError, AttributeError, KeyError, OSError, SyntaxError) as error:
        return f"vLLM {version()} is unknown ({type(error).__name__}: {error})"
    if found not in KNOWN:
        return f"vLLM {version()} is unknown: its batcher has the fingerprint {found}"
    return ""


def fingerprint(replaced: Iterable[Callable[..., Any]]) -> str:
    """A hash of the code that decides what a batch is; comments, docstrings and annotations don't
    count, nor does the Python that reads it."""
    trees: dict[str, dict[int, ast.AST]] = {}
    code = hashlib.sha256()
    for function in (*replaced, *_deciding_functions()):
        path = function.__code__.co_filename
        if path not in trees:
            trees[path] = _functions_by_line(Path(path).read_text(encoding="utf-8"))
        code.update(_canonical(trees[path][function.__code__.co_firstlineno]).encode())
    return code.hexdigest()[:16]


def _functions_by_line(source: str) -> dict[int, ast.AST]:
    """A module's functions by the line that a code object names as its first."""
    functions: dict[int, ast.AST] = {}
    todo: list[ast.stmt] = list(ast.parse(source).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef):
            todo += node.body
        elif isinstance(node, ast.FunctionDef):
            functions[min([node.lineno, *(d.lineno for d in node.decorator_list)])] = node
    return functions


def _deciding_functions() -> Iterator[Callable[..., Any]]:
    utils = importlib.import_module("vllm.multimodal.utils")
    inputs = importlib.import_module("vllm.multimodal.inputs")
    yield utils._can_batch_mm_items
    yield inputs.nested_tensors_equal
    yield inputs._nested_tensors_are_cpu
    yield inputs._nested_tensors_h2d
    yield inputs._is_dense
    yield inputs.BaseMultiModalField.reduce_data
    yield inputs.MultiModalBatchedField._reduce_data
    yield inputs.MultiModalFlatField._reduce_data
    yield inputs.MultiModalSharedField._reduce_data
    yield inputs.json_map_leaves
    yield inputs.json_iter_leaves
    yield inputs.is_list_of


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
        has_docstring = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
        kept = value[1:] if name == "body" and has_docstring else value
        if kept is not None and kept != []:
            parts.append(f"{name}={_canonical(kept)}")
    return f"{type(node).__name__}({','.join(parts)})"


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
