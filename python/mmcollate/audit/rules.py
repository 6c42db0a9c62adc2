"""What a device would have done with an operation: refused it, waited, or copied.

torch's own rules, as far as they concern placement. All tensors of an operation are on one device,
except that tensors without dimensions may come from the CPU, and some arguments (indices, lengths).
The host waits where an operation's result has a shape or a value that it has to know.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mmcollate.audit.observe import Recorder
from mmcollate.audit.refusals import Question, refused

DEVICE = torch.device("cuda", 0)
"""Where virtual device tensors say they are."""
CPU = torch.device("cpu")

COPIES = frozenset(
    {
        *("copy", "copy_", "_foreach_copy_"),
        *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
    }
)
"""Operations that take a tensor's values wherever they are, to where their first argument is."""

VALUES_UNUSED = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("rand_like", "randint_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    }
)
"""Factories that want a tensor for its shape, dtype and place."""

_WAITING = frozenset(
    {
        *("_linalg_check_errors", "_local_scalar_dense", "allclose", "argwhere", "bincount"),
        *("cholesky", "equal", "masked_select", "nonzero", "_unique", "_unique2"),
        *("unique_consecutive", "unique_dim", "unique_dim_consecutive"),
    }
)
"""Others wait by their arguments, see :func:`_waits`."""

_FILLS = frozenset({"fill", "fill_"})
_WRITING_BY_INDEX = frozenset({"index_put", "index_put_", "_index_put_impl_"})
_INDEXING = frozenset({"index", "_unsafe_index"}) | _WRITING_BY_INDEX

HOST_SIZES = {"_pack_padded_sequence": "lengths", "_pad_packed_sequence": "batch_sizes"}
"""What has to be on the CPU wherever the others are; of it the second result is made, there too."""

_READ_VALUE = frozenset({"masked_fill", "masked_fill_", "index_fill", "index_fill_"})
"""Operations of which the host reads ``value``, wherever it is, if that is a tensor."""

_POINTWISE = frozenset({"floor_divide", "floor_divide_", "mse_loss", "smooth_l1_loss", "dist"})
"""Operations that torch does not call pointwise, but runs like those."""

_ONE_DEVICE = frozenset(
    {
        *("clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_"),
        *("gcd", "gcd_", "lcm", "lcm_", "logaddexp", "logaddexp2", "nextafter", "nextafter_"),
        *("igamma", "igamma_", "igammac", "igammac_", "equal", "sigmoid_backward"),
        *("masked_fill", "masked_fill_"),
    }
)
"""Pointwise operations that refuse even a tensor without dimensions."""


@dataclass
class Memory:
    """What tensors that share a storage have in common."""

    on_device: bool
    fields: set[str] = field(default_factory=set)
    """From which the values stem; the whole storage's, however small the part written."""
    placed_by: set[str] = field(default_factory=set)
    """Fields that do not give the values but the place, as of what is made with
    ``device=grid.device``."""
    pinned: bool = False

    def copy(self) -> "Memory":
        """The same, for another storage."""
        return Memory(self.on_device, set(self.fields), set(self.placed_by), self.pinned)


class Operand(NamedTuple):
    """A tensor that goes into an operation."""

    tensor: torch.Tensor
    argument: str
    """Its name in the operation's schema; empty if there is none."""
    held: torch.Tensor
    """The CPU tensor with its values."""
    memory: Memory | None
    """``None`` of a plain tensor."""
    written: bool = False
    """Whether the operation writes to it."""

    @property
    def on_device(self) -> bool:
        return self.memory is not None and self.memory.on_device

    @property
    def fields(self) -> set[str]:
        """From which the values stem."""
        return set() if self.memory is None else self.memory.fields

    @property
    def decided_by(self) -> set[str]:
        """Whose flags decide where it is."""
        return set() if self.memory is None else self.memory.fields | self.memory.placed_by

    def is_of(self, name: str) -> bool:
        """Whether it is nothing foreign to a field: its values are the field's, or they are no
        field's and it is made where the field is."""
        return name in self.fields or (not self.fields and name in self.decided_by)

    def __str__(self) -> str:
        dtype = str(self.held.dtype).removeprefix("torch.")
        shape = "nested" if self.held.is_nested else ", ".join(map(str, self.held.shape))
        stems = sorted(self.fields)
        stems += [f"placed as {name}" for name in sorted(self.decided_by - self.fields)]
        known = f" [{', '.join(stems)}]" if stems else ""
        return f"{dtype} ({shape}) on {DEVICE if self.on_device else CPU}{known}"


def fields_of(operands: Iterable[Operand]) -> set[str]:
    """From which fields any of the values stem."""
    return set().union(*(op.fields for op in operands))


def decided_by(operands: Iterable[Operand]) -> set[str]:
    """Whose flags decide where any of them is."""
    return set().union(*(op.decided_by for op in operands))


class Rules:
    """Tells a recorder what a device would have done."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._asked: list[Question] = []
        """What each instruction of the model last asked, in order."""

    def operation(
        self,
        label: str,
        name: str,
        operands: Sequence[Operand],
        arguments: Mapping[str, Any],
        *,
        caller: str,
        strict: bool,
        scalars: bool,
    ) -> None:
        """An operation on tensors that may be anywhere.

        Args:
            label: Its full name, for events.
            name: Its short name, by which the rules go.
            operands: Its tensors, in order.
            arguments: All that it was given, by name.
            caller: The torch function that Python called; names what reads a value.
            strict: Whether plain tensors on the CPU are refused by a device.
            scalars: Whether a tensor without dimensions may be on the CPU, by all that torch says.
        """
        self._recorder.touched |= fields_of(operands)
        device = [op for op in operands if op.on_device]
        if name in _FILLS and len(operands) == 2 and len(device) == 1:
            # From another place torch takes the value as a number.
            self.read(label, operands[1])
            return
        if name in _READ_VALUE and operands[0].on_device:
            for op in operands:
                if op.argument == "value":
                    self.read(label, op)
            operands = [op for op in operands if op.argument != "value"]
            device = [op for op in operands if op.on_device]
        if device:
            self._mixed(label, name, operands, strict, scalars)
            if _waits(name, operands, arguments):
                self.sync(caller or label if name == "_local_scalar_dense" else label, device)
            self._uses(label, device)
        elif name == "_local_scalar_dense":
            self.read(caller or label, operands[0])

    def _mixed(
        self, label: str, name: str, operands: Sequence[Operand], strict: bool, scalars: bool
    ) -> None:
        host = HOST_SIZES.get(name)
        for op in operands:
            if op.on_device and op.argument == host:
                self.refused_place(label, op)
        free = [op for op in operands if op.argument != host]
        device = [op for op in free if op.on_device]
        numbers = _numbers(name, free, strict, scalars)
        refused = []
        for op in free:
            if op.on_device or not device or any(op is x for x in numbers):
                continue
            if name in _INDEXING and op.argument == "indices" and operands[0].on_device:
                self._implicit_copy(label, op, operands)
            elif strict or op.decided_by:
                refused.append(op)
        if refused:
            self._recorder.record(
                "mismatch",
                label,
                decided_by(refused),
                on_device=decided_by(device),
                detail=_detail(operands),
            )

    def _implicit_copy(self, label: str, index: Operand, operands: Sequence[Operand]) -> None:
        """An index on the CPU: torch copies it to the device, and waits."""
        if index.held.dim() > 0:
            self._recorder.record(
                "restored",
                label,
                index.fields,
                detail=_detail(operands),
                num_bytes=index.held.nbytes,
                non_blocking=False,
            )

    def _uses(self, label: str, device: Sequence[Operand]) -> None:
        if len(device) > 1:
            for name in sorted(decided_by(device)):
                if not all(op.is_of(name) for op in device):
                    self._recorder.device_use(name, label, _detail(device))

    def ask(self, label: str, op: Operand) -> None:
        """The model asks where a tensor is; what it then raises may be its own refusal."""
        if (frame := next(self._recorder.frames(), None)) is None:
            return
        question = Question(
            frame.f_code,
            frame.f_lasti,
            frame.f_lineno,
            label,
            op.on_device,
            frozenset(op.decided_by),
            str(op) if op.decided_by else "",
            self._recorder.stack() if op.decided_by else (),
        )
        for name in question.fields:
            self._recorder.asked[name] = question.stack[0]
        for place, other in enumerate(self._asked):
            if (other.code, other.instruction) == (question.code, question.instruction):
                # As in a loop: what was asked before has had its answer.
                del self._asked[: place + 1]
                break
        self._asked.append(question)

    def failed(self, error: Exception) -> None:
        """The forward raised: tensors' places are refused if the model did so itself, under a
        condition in which it had just asked for these places."""
        questions = [question for question in refused(error, self._asked) if question.fields]
        if not questions:
            return
        last = questions[-1]
        kept = [x for x in questions if not x.on_device]
        moved = frozenset().union(*(x.fields for x in questions if x.on_device))
        self._recorder.record(
            "mismatch",
            last.label,
            frozenset().union(*(x.fields for x in kept)),
            on_device=moved if kept else (),
            misplaced=() if kept else moved,
            detail=", ".join(dict.fromkeys(x.detail for x in questions)),
            stack=last.stack,
        )

    def touch(self, op: Operand) -> None:
        """A tensor's values are wanted, if only to be handed on as they are."""
        self._recorder.touched |= op.fields

    def sync(self, label: str, device: Sequence[Operand]) -> None:
        """The host waits for tensors of the device."""
        self._recorder.record("sync", label, fields_of(device), detail=_detail(device))

    def read(self, label: str, op: Operand) -> None:
        """The host reads a tensor's values."""
        self.touch(op)
        if op.on_device:
            self.sync(label, [op])
        elif op.fields:
            self._recorder.record("host_read", label, op.fields, detail=str(op))

    def refused_place(self, label: str, op: Operand) -> None:
        """A tensor has to be on the CPU, for the host wants its memory, and is not."""
        self.touch(op)
        self._recorder.record("mismatch", label, (), misplaced=op.decided_by, detail=str(op))

    def transfer(
        self, label: str, source: Operand, to_device: bool, num_bytes: int, non_blocking: bool
    ) -> None:
        """A tensor's values are copied to where they are wanted."""
        self.touch(source)
        if source.on_device != to_device:
            self._recorder.record(
                "restored" if to_device else "sync",
                label,
                source.fields,
                detail=str(source),
                num_bytes=num_bytes,
                non_blocking=non_blocking,
            )


def _numbers(name: str, operands: Sequence[Operand], strict: bool, scalars: bool) -> list[Operand]:
    """The operands that may be on the CPU because they have no dimensions."""
    found = [op for op in operands if not op.on_device and op.held.dim() == 0 and not op.written]
    if not strict or name.startswith("_foreach"):
        return found
    if name in _INDEXING:
        return [op for op in found if op.argument in ("indices", "values")]
    if name in _ONE_DEVICE or not (scalars or name in _POINTWISE):
        return []
    # A kernel takes one such number.
    return found if len(found) == 1 or name in ("", "where") else []


def _waits(name: str, operands: Sequence[Operand], arguments: Mapping[str, Any]) -> bool:
    """Whether the host waits for a device that runs this operation."""
    if name in _WAITING:
        return True
    if name == "repeat_interleave":
        return arguments.get("output_size") is None
    if name == "histc":
        return bool(arguments.get("min", 0) == arguments.get("max", 0))
    if name == "normal":
        return any(op.argument == "std" for op in operands)
    if name == "segment_reduce":
        return arguments.get("lengths") is not None and not arguments.get("unsafe")
    if name == "isin":
        return _sorts(operands) and not arguments.get("assume_unique")
    if name in _INDEXING:
        by_mask = any(
            op.argument == "indices" and op.on_device and op.held.dtype in (torch.bool, torch.uint8)
            for op in operands
        )
        return by_mask and not (name in _WRITING_BY_INDEX and _fills(operands, arguments))
    return False


def _fills(operands: Sequence[Operand], arguments: Mapping[str, Any]) -> bool:
    """Whether one value of the host's is written through a mask: torch then needs no positions."""
    values = [op for op in operands if op.argument == "values"]
    return not arguments.get("accumulate") and all(
        op.held.numel() == 1 and not op.on_device for op in values
    )


def _sorts(operands: Sequence[Operand]) -> bool:
    """Whether ``torch.isin`` finds what is in so many others by sorting."""
    sizes = {op.argument: op.held.numel() for op in operands}
    return sizes.get("test_elements", 1) >= int(10 * sizes.get("elements", 1) ** 0.145)


def _detail(operands: Iterable[Operand]) -> str:
    return ", ".join(map(str, operands))
