"""Whether a model refused a tensor for the place where it is."""

import ast
import linecache
from types import CodeType

from mmcollate.audit.observe import raised_in


def refused(error: Exception, code: CodeType, line: int) -> bool:
    """Whether an exception is a model's answer to what one of its lines asked.

    It is if the model's own ``raise`` or ``assert`` made it, in the same function, and the line is
    part of the condition of that ``assert``, or of the innermost ``if`` round that ``raise``. Code
    without source refuses nothing.
    """
    found = raised_in(error)
    if found is None or found[0].f_code is not code:
        return False
    tree = _tree(code.co_filename)
    condition = None if tree is None else _condition(tree, found[1], error)
    return condition is not None and _covers(condition, line)


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
        if isinstance(node, ast.If) and any(_covers(x, line) for x in node.body + node.orelse):
            guard = node.test
        raises |= isinstance(node, ast.Raise) and _covers(node, line)
    return guard if raises else None


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
