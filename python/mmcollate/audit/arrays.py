"""Numpy arrays that remember from which fields their values stem."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves, tree_map


class Source(NamedTuple):
    """A field of an audit; the next audit's field of the same name is another."""

    session: int
    field: str


def traced_array(array: Any, sources: Iterable[Source]) -> Any:
    """A view of a numpy array that, with all that numpy makes of it, knows these fields."""
    traced = array.view(_traced_class())
    traced.mmcollate_sources = frozenset(sources)
    return traced


def known_sources(array: Any) -> frozenset[Source] | None:
    """The fields that an array remembers; ``None`` if it is not one that does."""
    return getattr(array, "mmcollate_sources", None)


@functools.cache
def _traced_class() -> Any:
    import numpy as np

    def sources_of(*values: Any) -> frozenset[Source]:
        return frozenset().union(*(known_sources(x) or () for x in tree_leaves(values)))

    def plain(value: Any) -> Any:
        return value.view(np.ndarray) if isinstance(value, TracedArray) else value

    def traced(result: Any, sources: frozenset[Source]) -> Any:
        def known(x: Any) -> Any:
            if type(x) not in (np.ndarray, TracedArray):
                return x
            return traced_array(x, sources | (known_sources(x) or frozenset()))

        return tree_map(known, result)

    class TracedArray(np.ndarray):
        def __array_finalize__(self, source: Any) -> None:
            self.mmcollate_sources: frozenset[Source] = known_sources(source) or frozenset()

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            return self._called(getattr(ufunc, method), inputs, kwargs)

        def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return self._called(func, args, kwargs)

        def __setitem__(self, index: Any, value: Any) -> None:
            super().__setitem__(index, value)
            self.mmcollate_sources |= sources_of(value)

        @staticmethod
        def _called(func: Any, args: Any, kwargs: Any) -> Any:
            """Runs a function of numpy's on plain arrays; what it returns or writes to knows all
            fields of what went in."""
            sources = sources_of(args, kwargs)
            result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
            out = kwargs.get("out")
            # What returns nothing writes to the first that it is given.
            for target in args[:1] if result is None else out if type(out) is tuple else (out,):
                if isinstance(target, TracedArray):
                    target.mmcollate_sources |= sources
            if type(out) is not tuple:
                return traced(result, sources) if out is None else out
            results = result if type(result) is tuple else (result,)
            given = [
                traced(made, sources) if target is None else target
                for made, target in zip(results, out, strict=True)
            ]
            return tuple(given) if len(given) > 1 else given[0]

    return TracedArray
