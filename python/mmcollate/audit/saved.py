"""Memory that has to be as before: saved when something is about to write to it."""

import torch

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Saved:
    """Copies of guarded memory, made when they are needed."""

    def __init__(self) -> None:
        self._guarded: set[int] = set()
        self._once_guarded: set[int] = set()
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def guard(self, tensor: torch.Tensor) -> None:
        """Has memory, which has to stay alive, saved before something writes to it."""
        if key := storage_of(tensor):
            self._guarded.add(key)
            self._once_guarded.add(key)

    def was_guarded(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is guarded, or was before :meth:`put_back`."""
        return storage._cdata in self._once_guarded

    def before_write(self, tensor: torch.Tensor) -> None:
        """A tensor may be written to from now on."""
        if (key := storage_of(tensor)) in self._guarded:
            self._guarded.remove(key)
            storage = values_of(tensor).untyped_storage()
            self._copies[key] = storage, storage.clone()  # type: ignore[no-untyped-call]

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether guarded memory is not as it was."""
        return (pair := self._copies.get(storage_of(tensor))) is not None and _differ(*pair)

    def put_back(self) -> list[int]:
        """Undoes what was written; nothing is guarded then.

        Returns:
            The storages that may have been written to.
        """
        for storage, copy in self._copies.values():
            # What nobody wrote to may be read-only.
            if _differ(storage, copy):
                if storage.nbytes() != copy.nbytes():
                    storage.resize_(copy.nbytes())
                storage.copy_(copy)
        written = list(self._copies)
        self._copies.clear()
        self._guarded.clear()
        return written


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage this is, for as long as it lives; 0 if it has none."""
    held = values_of(tensor)
    return int(held.untyped_storage()._cdata) if held.layout is torch.strided else 0


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a sparse tensor that of its values; any other itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def _differ(storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> bool:
    return storage.nbytes() != copy.nbytes() or not torch.equal(_bytes(storage), _bytes(copy))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
