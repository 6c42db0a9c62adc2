"""Whether a model refused a tensor for the place where it is."""

import ast
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import NamedTuple

from mmcollate.audit.findings import Site
from mmcollate.audit.observe import raised_in


class Question(NamedTuple):
    """One of the model's lines asked where a tensor is."""

    code: CodeType
    instruction: int
    line: int
    label: str
    on_device: bool
    """The answer."""
    fields: frozenset[str]
    """Whose flags decided about it; those of a tensor of the model's own are none."""
    detail: str
    stack: tuple[Site, ...]


_PLACES = ("device", "is_cpu", "is_cuda", "get_device")
_HANDS_ON = ("str", "repr", "bool", "len", "set")
"""Functions whose answer tells of the place that they are given."""


def refused(error: Exception, questions: Sequence[Question]) -> list[Question]:
    """The questions whose answers made a model raise.

    They did if the model's own ``raise`` or ``assert`` made the exception, and a question is part
    of the condition of that ``assert``, or of the innermost ``if`` round that ``raise``, or its
    answer is the variable that is the condition. Of several the last one decided, unless places
    were compared with each other. Code without source refuses nothing.
    """
    found = raised_in(error)
    tree = None if found is None else _tree(found[0].f_code.co_filename)
    condition = None if found is None or tree is None else _condition(tree, found[1], error)
    if found is None or tree is None or condition is None:
        return []
    own = [question for question in questions if question.code is found[0].f_code]
    condition = _assigned(tree, condition, [x.line for x in own]) or condition
    places = list(_places(condition))
    asked = [x for x in own if any(_covers(place, x.line) for place in places)]
    return asked if _compares(condition) else asked[-1:]


def _tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def _condition(tree: ast.Module, line: int, error: Exception) -> ast.expr | None:
    """On which the statement at a line raises."""
    guard, raises = None, False
    # Outer statements come before inner ones.
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and _covers(node, line):
            return node.test if isinstance(error, AssertionError) else None
        if isinstance(node, ast.Call) and _covers(node, line) and _name(node.func) == "_assert":
            return node.args[0] if isinstance(error, AssertionError) and node.args else None
        if isinstance(node, ast.If) and any(_covers(x, line) for x in node.body + node.orelse):
            guard = node.test
        raises |= isinstance(node, ast.Raise) and _covers(node, line)
    return guard if raises else None


def _assigned(tree: ast.Module, condition: ast.expr, lines: Sequence[int]) -> ast.expr | None:
    """What a variable was set to on one of these lines, if the condition is nothing but it."""
    while isinstance(condition, ast.UnaryOp):
        condition = condition.operand
    if not isinstance(condition, ast.Name):
        return None
    for node in ast.walk(tree):
        sets = isinstance(node, ast.Assign) and list(map(_name, node.targets)) == [condition.id]
        if isinstance(node, ast.Assign) and sets and any(_covers(node, line) for line in lines):
            return node.value
    return None


def _places(node: ast.AST) -> Iterator[ast.Attribute]:
    """Where an expression asks for a place; not for one that a function is given to work at."""
    if isinstance(node, ast.Attribute) and node.attr in _PLACES:
        yield node
    handed = isinstance(node, ast.Call) and _name(node.func) not in _HANDS_ON
    for part in [node.func] if handed else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from _places(part)


def _compares(condition: ast.expr) -> bool:
    """Whether places are compared with each other."""
    for node in ast.walk(condition):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if sum(any(_places(side)) for side in sides) > 1:
                return True
        if isinstance(node, ast.Set) and any(_places(node)):
            return True
    return False


def _name(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
