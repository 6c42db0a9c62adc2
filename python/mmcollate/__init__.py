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
from mmcollate.omitting import OMITTED, Present
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
from mmcollate.stripping import (
    CoveredPrefix,
    FeaturePolicy,
    Stripped,
    gather_field,
    strip_covered,
)

__all__ = [
    "OMITTED",
    "ArenaStats",
    "Batched",
    "CollateIndexError",
    "CollateKeyError",
    "CollateMemoryError",
    "CollateRuntimeError",
    "CollateTypeError",
    "CollateValueError",
    "CoveredPrefix",
    "FeaturePolicy",
    "Field",
    "FieldPlan",
    "Flat",
    "Group",
    "GroupPlan",
    "MMCollateError",
    "Plan",
    "Present",
    "Shared",
    "Staged",
    "Stripped",
    "__version__",
    "arena_stats",
    "collate",
    "collate_groups",
    "detach",
    "explain",
    "gather_field",
    "reserve",
    "reset_stats",
    "restore",
    "restored",
    "retained_bytes",
    "stage",
    "stats",
    "strip_covered",
    "trim",
]
