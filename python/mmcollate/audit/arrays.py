"""Numpy arrays that remember from which fields their values stem."""

import functools
from collections.abc import Iterable
from typing import Any

from torch.utils._pytree import tree_map


def traced_array(array: Any, fields: Iterable[str]) -> Any:
    """A view of a numpy array that, with all that numpy makes of it, knows these fields."""
    traced = array.view(_traced_class())
    traced.mmcollate_fields = frozenset(fields)
    return traced


def known_fields(array: Any) -> frozenset[str] | None:
    """The fields that an array remembers; ``None`` if it is not one that does."""
    return getattr(array, "mmcollate_fields", None)


@functools.cache
def _traced_class() -> Any:
    import numpy as np

    class TracedArray(np.ndarray):
        def __array_finalize__(self, source: Any) -> None:
            self.mmcollate_fields: frozenset[str] = getattr(source, "mmcollate_fields", frozenset())

        def __array_ufunc__(
            self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any
        ) -> Any:
            fields = frozenset().union(*(known_fields(x) or () for x in inputs))
            plain = [x.view(np.ndarray) if isinstance(x, TracedArray) else x for x in inputs]
            if out is not None:
                kwargs["out"] = tuple(
                    x.view(np.ndarray) if isinstance(x, TracedArray) else x for x in out
                )
            result = getattr(ufunc, method)(*plain, **kwargs)
            if out is not None:
                return out[0] if len(out) == 1 else out
            return tree_map(
                lambda x: traced_array(x, fields) if type(x) is np.ndarray else x, result
            )

    return TracedArray
