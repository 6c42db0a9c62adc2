"""strip_covered(): features without the payload that a prefix cache makes needless."""

import bisect
import contextlib
import copy
import dataclasses
import operator
import sys
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from mmcollate import bits, errors
from mmcollate.fields import Field
from mmcollate.omitting import OMITTED, Omitted


class Stripped(NamedTuple):
    """What :func:`strip_covered` returns."""

    features: list[Any]
    """One for each of those given, in their order: a copy without its payload, or the same."""
    num_stripped: int
    """How many are without their payload, or without some of it."""
    bytes_dropped: int
    """Bytes of tensors, arrays and byte strings that these are without."""


class FeaturePolicy:
    """How an engine's features are read. As it is, for vLLM's and others with the same attributes:
    ``data``, a mapping from field name to element, with ``mm_position.offset`` and ``.length``.

    For another engine's, override what is different there; nothing is asked of a feature elsewhere.

    Args:
        fields: Where the elements are plain values: what each named field is, as for
            :func:`mmcollate.collate`. ``None`` where they have attributes ``data`` and ``field``.
    """

    dropped: Any = None
    """What a feature has in the place of a payload of which nothing is left: as in vLLM ``None``;
    ``mmcollate.OMITTED`` tells a receiver that it did not get lost, where features are pickled:
    vLLM's own message encoding refuses it."""

    def __init__(self, fields: Mapping[str, Field] | None = None) -> None:
        self.fields = fields

    def payload(self, feature: Any) -> Mapping[str, Any] | Omitted | None:
        """The feature's elements by name; ``None``, or ``OMITTED``, if they are not here."""
        payload: Mapping[str, Any] | Omitted | None = feature.data
        return payload

    def end(self, feature: Any) -> int:
        """Where its tokens end in the prompt: index of the last, plus one."""
        position = feature.mm_position
        end: int = position.offset + position.length
        return end

    def modality(self, feature: Any) -> str | None:
        """What errors call it."""
        return getattr(feature, "modality", None)

    def is_address(self, payload: Mapping[str, Any]) -> bool:
        """Whether the payload only says where it lies in shared memory: the receiver must get that
        to give the memory back, so it is never dropped."""
        return "address" in payload

    def is_kept(self, name: str, element: Any) -> bool:
        """Whether the field is metadata for the host, of which positions are computed. ``OMITTED``
        in the place of an element is kept where nothing else tells, for what it says."""
        if self.fields is None:
            return element is OMITTED or bool(element.field.keep_on_cpu)
        if name not in self.fields:
            raise errors.undeclared_field(None, name, element, None)
        return self.fields[name].keep_on_cpu

    def value(self, element: Any) -> Any:
        """What collation takes of an element."""
        stands_in = element is None or element is OMITTED
        return element.data if self.fields is None and not stands_in else element

    def with_payload(self, feature: Any, payload: Any) -> Any:
        """A copy of the feature that has this payload; the feature is not changed.

        A dataclass is copied by ``dataclasses.replace``, as in vLLM: what ``__post_init__`` derives
        is derived anew.

        Args:
            feature: Any.
            payload: A ``dict`` of what is kept; of vLLM's features and items, a
                ``MultiModalKwargsItem``. Or :attr:`dropped`.
        """
        if dataclasses.is_dataclass(feature) and not isinstance(feature, type):
            return dataclasses.replace(feature, data=payload)
        if isinstance(feature, tuple):
            return feature._replace(data=payload)  # type: ignore[attr-defined]
        copied = copy.copy(feature)
        copied.data = payload
        return copied

    def parts(self, features: Sequence[Any], *, contents: bool) -> list[Any]:
        """All objects of which the features consist, as far as they decide what is left of them.
        While they are the same ones, :class:`CoveredPrefix` takes what it has.

        Args:
            features: Some of a request's.
            contents: Whether those that their payloads consist of count.
        """
        parts = _attributes(features)
        payloads = [*map(self.payload, features)]
        # Not all that a feature shows is an attribute of its own: there are slots and properties.
        parts += payloads
        found = [x for x in payloads if not isinstance(x, (Omitted, type(None)))]
        # The dict within a UserDict is read ten times as fast.
        if all(issubclass(kind, UserDict) for kind in set(map(type, found))):
            found = [*map(_data_of, found)]
        parts += map(self.is_address, found)
        if contents:
            elements = [*chain.from_iterable(x.values() for x in found)]
            parts += [*map(len, found), *chain.from_iterable(found), *elements]
            if self.fields is None:
                parts += [getattr(element, "field", None) for element in elements]
        return parts


_data_of = operator.attrgetter("data")


def _attributes(features: Sequence[Any]) -> list[Any]:
    with contextlib.suppress(TypeError):
        attributes: Iterable[Any] = map(vars, features)
        return [*chain.from_iterable(map(dict.values, attributes))]
    found: list[Any] = []
    for feature in features:
        if dataclasses.is_dataclass(feature):
            found += [getattr(feature, field.name, None) for field in dataclasses.fields(feature)]
        elif isinstance(feature, tuple):
            found += feature
        else:
            found.append(object())  # who knows; this one is the same as no other
    return found


def strip_covered(
    features: Iterable[Any],
    num_computed_tokens: int,
    *,
    positions_needed: bool,
    policy: FeaturePolicy | None = None,
) -> Stripped:
    """Leaves out what no encoder will be run for: the payload of features whose tokens are all
    computed already, as a prefix cache has them.

    Args:
        features: A request's, such as vLLM's ``MultiModalFeatureSpec``. They are not changed.
        num_computed_tokens: How many tokens of the prompt are computed, from its start. A feature
            that ends there is covered.
        positions_needed: Whether the receiver computes positions from the fields that are kept on
            the CPU (M-RoPE, XD-RoPE). Covered features then have those and no others.
        policy: How to read features that are unlike vLLM's.

    Returns:
        ``(features, num_stripped, bytes_dropped)``: the features as vLLM's
        ``strip_covered_mm_data`` returns them. The list is a new one; elements that are left are
        the same objects, in a plain ``MultiModalKwargsItem`` as vLLM makes it, or in a ``dict`` if
        neither feature nor payload was vLLM's. Features without a payload, and those that only have
        the address of one, stay as they are.

    Raises:
        CollateTypeError: ``num_computed_tokens`` is no number of tokens.
        CollateValueError: It is negative.
        CollateKeyError: The policy's fields lack one that a covered feature has.
    """
    policy = FeaturePolicy() if policy is None else policy
    computed, given = _tokens(num_computed_tokens), list(features)
    if not computed:
        return Stripped(given, 0, 0)
    results = [_left_of(feature, computed, positions_needed, policy) for feature in given]
    return Stripped(
        [result.feature for result in results],
        sum(result.is_stripped for result in results),
        sum(result.nbytes for result in results),
    )


class _Left(NamedTuple):
    """What is left of one feature."""

    feature: Any
    nbytes: int
    is_stripped: bool
    """Whether it is a copy without payload."""
    until: int | None
    """The number of computed tokens from which on this holds; ``None`` if it does not hold yet."""


def _left_of(feature: Any, computed: int, positions_needed: bool, policy: FeaturePolicy) -> _Left:
    payload = policy.payload(feature)
    if payload is None or isinstance(payload, Omitted) or policy.is_address(payload):
        return _Left(feature, 0, False, 0)
    end = policy.end(feature)
    if end > computed:
        return _Left(feature, 0, False, None)
    kept: dict[str, Any] = {}
    nbytes = 0
    for name, element in payload.items():
        if positions_needed and policy.is_kept(name, element):
            kept[name] = element
        else:
            nbytes += _nbytes(policy.value(element))
    data = _payload_of(kept, feature, payload) if positions_needed else policy.dropped
    return _Left(policy.with_payload(feature, data), nbytes, True, end)


def _payload_of(kept: dict[str, Any], feature: Any, payload: Any) -> Mapping[str, Any]:
    inputs = sys.modules.get("vllm.multimodal.inputs")
    if inputs is not None and (
        isinstance(feature, inputs.MultiModalFeatureSpec)
        or isinstance(payload, inputs.MultiModalKwargsItem)
    ):
        item: Mapping[str, Any] = inputs.MultiModalKwargsItem(kept)
        return item
    return kept


class CoveredPrefix:
    """What :func:`strip_covered` has left of one request's features, for its next step.

    The result is that of the function, always: also when tokens are no longer computed, as after a
    preemption, and when features, or those that were returned, are changed or replaced. Only
    features that were not covered before are read and copied. Of the others all parts are compared,
    by identity; while they are the same, so are the copies, and if one differs, all are made anew.
    Where an element got other data meanwhile, ``bytes_dropped`` counts what it had.

    What is remembered is the covered features before the first that is not: a request's are in the
    order of the prompt. They are kept, payload included, until :meth:`forget`. Not for several
    threads at a time.

    Args:
        positions_needed: As for :func:`strip_covered`.
        policy: As for :func:`strip_covered`.
        frozen: Whether nobody changes features in place, nor those that are returned. Then only
            whether they are the same objects is compared, and the cost of a step is that of the new
            ones.
    """

    def __init__(
        self,
        *,
        positions_needed: bool,
        policy: FeaturePolicy | None = None,
        frozen: bool = False,
    ) -> None:
        self._positions_needed = positions_needed
        self._policy = FeaturePolicy() if policy is None else policy
        self._frozen = frozen
        self._runs: list[_Run] = []
        self._left: list[Any] = []
        # For each: how many computed tokens cover it and all before it, and these' sums.
        self._until: list[int] = []
        self._sums: list[tuple[int, int]] = [(0, 0)]

    def strip(self, features: Iterable[Any], num_computed_tokens: int) -> Stripped:
        """As :func:`strip_covered`, of all of the request's features as they are now."""
        computed, given = _tokens(num_computed_tokens), list(features)
        if not computed:
            return Stripped(given, 0, 0)
        if not self._is_of(given):
            self.forget()
        known = bisect.bisect_right(self._until, computed)
        results = [
            _left_of(feature, computed, self._positions_needed, self._policy)
            for feature in given[known:]
        ]
        left = [*self._left[:known], *(result.feature for result in results)]
        stripped, nbytes = self._sums[known]
        # If fewer are covered than are known, the first of these results is not.
        self._remember(given[known:], results)
        return Stripped(
            left,
            stripped + sum(result.is_stripped for result in results),
            nbytes + sum(result.nbytes for result in results),
        )

    def forget(self) -> None:
        """Lets go of what was stripped so far."""
        self._runs, self._left, self._until, self._sums = [], [], [], [(0, 0)]

    def _is_of(self, features: list[Any]) -> bool:
        """Whether what is remembered is of these features, and nothing of it has changed."""
        start = 0
        for run in self._runs:
            stop = start + len(run.features)
            if not _are_same(features[start:stop], run.features):
                return False
            if not self._frozen and (
                [*map(self._policy.end, run.features)] != run.ends
                or not _are_same(self._parts(run.features), run.parts)
                or not _are_same(self._parts(self._left[start:stop]), run.left_parts)
            ):
                return False
            start = stop
        return True

    def _parts(self, features: Sequence[Any]) -> list[Any]:
        return self._policy.parts(features, contents=self._positions_needed)

    def _remember(self, features: list[Any], results: list[_Left]) -> None:
        covered = list(takewhile(lambda result: result.until is not None, results))
        if not covered:
            return
        left = [result.feature for result in covered]
        features = features[: len(left)]
        ends = [*map(self._policy.end, features)]
        parts = ([], []) if self._frozen else (self._parts(features), self._parts(left))
        self._runs.append(_Run(features, ends, *parts))
        self._left += left
        for result in covered:
            stripped, nbytes = self._sums[-1]
            self._sums.append((stripped + result.is_stripped, nbytes + result.nbytes))
            self._until.append(max([result.until or 0, *self._until[-1:]]))


class _Run(NamedTuple):
    """Features that were covered in one step. They and their parts are kept, so that no other
    object can have their place in memory."""

    features: list[Any]
    ends: list[int]
    """Where their tokens end, which an edit of a position in place changes."""
    parts: list[Any]
    left_parts: list[Any]


def _are_same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def gather_field(
    features: Sequence[Any],
    name: str,
    *,
    strict: bool = False,
    policy: FeaturePolicy | None = None,
) -> list[Any]:
    """One field's values, a slot for each feature.

    Args:
        features: As for :func:`strip_covered`; some may be stripped.
        name: The field's.
        strict: Whether a feature without a value is an error.
        policy: As for :func:`strip_covered`.

    Returns:
        As many values as there are features; the same objects. ``None`` where a feature does not
        have the field: its payload was stripped, or is of another modality or form.

    Raises:
        CollateKeyError: With ``strict``: a feature has no value there. ``item`` is its index.
    """
    policy = FeaturePolicy() if policy is None else policy
    values = []
    for index, feature in enumerate(features):
        payload = found = policy.payload(feature)
        if isinstance(payload, Mapping) and name in payload:
            found = policy.value(payload[name])
        is_here = found is not payload and found is not None and found is not OMITTED
        if strict and not is_here:
            is_address = isinstance(payload, Mapping) and policy.is_address(payload)
            modality = policy.modality(feature)
            raise errors.not_gathered(modality, name, index, found, is_address=is_address)
        values.append(found if is_here else None)
    return values


def _tokens(count: Any) -> int:
    try:
        if isinstance(count, bool):
            raise TypeError
        tokens = operator.index(count)
    except TypeError:
        raise errors.CollateTypeError(
            f"num_computed_tokens is {errors.describe(count)}, expected an int"
        ) from None
    if tokens < 0:
        raise errors.CollateValueError(f"num_computed_tokens is {tokens}, expected 0 or more")
    return tokens


def _nbytes(value: Any) -> int:
    """Bytes of the tensors, arrays and byte strings in a value, each counted once; those of which
    it can't be said, such as sparse tensors, count for none."""
    return sum(map(_own_nbytes, bits.walk(value)))


def _own_nbytes(value: Any) -> int:
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    try:
        return max(0, operator.index(getattr(value, "nbytes", 0)))
    except Exception:  # whatever a class raises: to count is not what is asked for
        return 0
