"""Collation of multimodal items: from mappings of fields to one batch.

>>> import torch
>>> from mmcollate import Batched, Flat, collate
>>> items = [
...     {"pixel_values": torch.zeros(4, 6), "grid": torch.tensor([1, 2, 2])},
...     {"pixel_values": torch.ones(6, 6), "grid": torch.tensor([1, 2, 3])},
... ]
>>> fields = {"pixel_values": Flat(), "grid": Batched(keep_on_cpu=True)}
>>> batch = collate(items, fields)
>>> batch["pixel_values"].shape, batch["grid"].tolist()
(torch.Size([10, 6]), [[1, 2, 2], [1, 2, 3]])
"""

from mmcollate._core import __version__
from mmcollate.collation import Group, collate, collate_groups, stage
from mmcollate.errors import (
    CollateIndexError,
    CollateKeyError,
    CollateMemoryError,
    CollateRuntimeError,
    CollateTypeError,
    CollateValueError,
    MMCollateError,
)
from mmcollate.explanation import FieldPlan, GroupPlan, Plan, explain
from mmcollate.fields import Batched, Field, Flat, Shared
from mmcollate.pinned import ArenaStats
from mmcollate.restoring import restore, restored
from mmcollate.staging import (
    Staged,
    arena_stats,
    detach,
    reserve,
    retained_bytes,
    trim,
)
from mmcollate.stats import reset_stats, stats

__all__ = [
    "ArenaStats",
    "Batched",
    "CollateIndexError",
    "CollateKeyError",
    "CollateMemoryError",
    "CollateRuntimeError",
    "CollateTypeError",
    "CollateValueError",
    "Field",
    "FieldPlan",
    "Flat",
    "Group",
    "GroupPlan",
    "MMCollateError",
    "Plan",
    "Shared",
    "Staged",
    "__version__",
    "arena_stats",
    "collate",
    "collate_groups",
    "detach",
    "explain",
    "reserve",
    "reset_stats",
    "restore",
    "restored",
    "retained_bytes",
    "stage",
    "stats",
    "trim",
]
