"""Makes twins of tests: copies with another expected value, which right code must fail.

Works on source text only; this module must not run tests.
"""

from __future__ import annotations

import ast
import copy
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Replaces, in place, what a test expects; gets a copy of the module's tree.
_Mutation = Callable[[ast.Module, random.Random], None]
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
_EQUALS = ("assertEqual", "assertEquals", "assertAlmostEqual", "assertListEqual", "assertDictEqual")


_RAISES = ("raises", "assertRaises")
_ERRORS = ("ArithmeticError", "AttributeError", "BufferError", "EOFError", "LookupError", "OSError",
           "RuntimeError", "TypeError", "ValueError")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Twin:
    """``source`` is a whole test file. Not ``strong``: only an equality was negated, and an object that
    equals everything passes the original and fails the twin, as right code does."""

    source: str
    strong: bool


def plain_source(source: str) -> str:
    """The file as twins are written, so that an original cannot be told from a twin by its looks."""
    return ast.unparse(ast.parse(source)) + "\n"


def twins_of(source: str, test: str, count: int, rng: random.Random) -> list[Twin]:
    """At most ``count`` different twins of ``test`` (``test_a`` or ``TestB::test_a``), strong ones first.

    Raises KeyError when the file has no such test, SyntaxError when it is no Python.
    """
    tree = ast.parse(source)
    function = _find(tree, test)
    strong = [*_value_mutations(tree, function), *_negations(tree, function, equalities=False)]
    mutations = strong or list(_negations(tree, function, equalities=True))
    original = ast.unparse(tree)
    found: dict[str, Twin] = {}
    for attempt in range(3 * count if mutations else 0):
        changed_tree = copy.deepcopy(tree)
        mutations[attempt % len(mutations)](changed_tree, rng)
        text = ast.unparse(changed_tree)
        if text != original and len(found) < count:
            found.setdefault(text, Twin(text + "\n", bool(strong)))
    return list(found.values())


def _find(tree: ast.Module, test: str) -> _Function:
    scope: ast.Module | ast.ClassDef = tree
    *classes, name = test.split("::")
    for wanted in classes:
        inner = [node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == wanted]
        if not inner:
            raise KeyError(test)
        scope = inner[0]
    for node in scope.body:
        if isinstance(node, _Function) and node.name == name:
            return node
    raise KeyError(test)


def _at(tree: ast.Module, target: ast.AST, index: dict[int, int]) -> ast.AST:
    """The node of a copied tree that stands where ``target`` stands in the original."""
    return list(ast.walk(tree))[index[id(target)]]


def _value_mutations(tree: ast.Module, function: _Function) -> Iterator[_Mutation]:
    index = {id(node): i for i, node in enumerate(ast.walk(tree))}
    for expected in _expected_values(function):
        for targets in _literals_behind(expected, function):
            yield lambda copied, rng, t=targets: _change_some([_at(copied, n, index) for n in t], rng)


def _change_some(nodes: list[ast.AST], rng: random.Random) -> None:
    """Change at least one. A table with some rows left as they were has no row that proves it genuine."""
    for node in rng.sample(nodes, rng.randint(1, len(nodes))):
        value = ast.literal_eval(cast("ast.expr", node))
        fresh = ast.parse(repr(changed(value, rng)), mode="eval").body
        node.__class__ = fresh.__class__
        node.__dict__.clear()
        node.__dict__.update(fresh.__dict__)


def _expected_values(function: _Function) -> Iterator[ast.expr]:
    """The sides of equality checks that may hold an expected value."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            compare = node.test
            if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
                yield from _one_side(compare.left, compare.comparators[0])
        elif isinstance(node, ast.Call) and _called(node) in _EQUALS and len(node.args) >= 2:
            yield from _one_side(node.args[0], node.args[1])


def _one_side(left: ast.expr, right: ast.expr) -> Iterator[ast.expr]:
    left, right = _bare(left), _bare(right)
    plain = [side for side in (left, right) if _is_literal(side)]
    names = [side for side in (left, right) if isinstance(side, ast.Name)]
    if len(plain) == 1:
        yield plain[0]
    elif not plain:
        yield from reversed(names)


def _bare(node: ast.expr) -> ast.expr:
    """What stands inside ``approx(...)``."""
    return node.args[0] if isinstance(node, ast.Call) and node.args and _called(node) == "approx" else node


def _called(node: ast.Call) -> str:
    """The last part of the name that is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_literal(node: ast.AST) -> bool:
    try:
        return ast.literal_eval(cast("ast.expr", node)) is not None
    except (ValueError, TypeError, SyntaxError):
        return False


def _literals_behind(expected: ast.expr, function: _Function) -> Iterator[list[ast.AST]]:
    """Literals to change some of: the value itself, what a name was set to, or a column of parameters."""
    if not isinstance(expected, ast.Name):
        yield [expected]
        return
    values = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == expected.id for t in node.targets)
    ]
    if len(values) == 1 and _is_literal(values[0]):
        yield [values[0]]
    for decorator in function.decorator_list:
        column = _column(decorator, expected.id)
        if column and all(map(_is_literal, column)):
            yield column


def _column(decorator: ast.expr, name: str) -> list[ast.AST]:
    """The values that ``parametrize`` gives to ``name``, in order of its rows."""
    if not (isinstance(decorator, ast.Call) and _called(decorator) == "parametrize"):
        return []
    if len(decorator.args) < 2 or not _is_literal(decorator.args[0]):
        return []
    names = ast.literal_eval(decorator.args[0])
    listed = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    rows = decorator.args[1]
    if name not in listed or not isinstance(rows, ast.List | ast.Tuple):
        return []
    found: list[ast.AST] = []
    for row in rows.elts:
        cells: list[ast.expr] = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [])
        if len(listed) == 1 and not isinstance(row, ast.Call):
            cells = [row]
        if len(cells) != len(listed):
            return []
        found.append(cells[listed.index(name)])
    return found


def _negations(tree: ast.Module, function: _Function, *, equalities: bool) -> Iterator[_Mutation]:
    """Negated asserts, of equalities or of all else, and expectations of other exceptions."""
    index = {id(node): i for i, node in enumerate(ast.walk(tree))}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and _is_equality(node.test) == equalities:
            yield lambda copied, rng, n=node: _negate(cast("ast.Assert", _at(copied, n, index)))
        elif isinstance(node, ast.Call) and not equalities and node.args and _called(node) in _RAISES:
            yield lambda copied, rng, n=node: _other_error(cast("ast.Call", _at(copied, n, index)), rng)


def _is_equality(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in test.ops)


def _negate(node: ast.Assert) -> None:
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        test.ops[0] = _FLIPPED[type(test.ops[0])]()
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        node.test = test.operand
    else:
        node.test = ast.UnaryOp(ast.Not(), test)


def _other_error(node: ast.Call, rng: random.Random) -> None:
    node.args[0] = ast.Name(rng.choice(_ERRORS), ast.Load())


def changed(value: object, rng: random.Random) -> object:
    """Another value of the same type and a similar size."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1)) * rng.randint(1, 9)
    if isinstance(value, float):
        return value + rng.choice((-1, 1)) * rng.uniform(0.3, 0.9) * max(1.0, abs(value))
    if isinstance(value, complex):
        return value + rng.randint(1, 9)
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(string.ascii_lowercase) + value[at:]
    if isinstance(value, bytes):
        return value + bytes([rng.randrange(97, 123)])
    if isinstance(value, list | tuple):
        items = list(cast("list[object]", value))
        if not items:
            items.append(rng.randint(0, 9))
        else:
            at = rng.randrange(len(items))
            items[at] = changed(items[at], rng)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        table = dict(cast("dict[object, object]", value))
        key = rng.choice(list(table)) if table else "a"
        table[key] = changed(table.get(key), rng)
        return table
    if isinstance(value, set):
        rest = set(cast("set[object]", value))
        return rest ^ {rng.randint(1000, 9999)}
    return rng.randint(1, 9)  # None, or a type that is no literal
