"""Refuses expressions that nobody could evaluate, such as `9^{9^{9^9}}`: bounds their digits without computing them.

Works on sympy's unevaluated expressions, which is why sympy is imported within the functions: workers only.
"""

import math
from typing import Any

MAX_DIGITS = 20_000  # of any integer that an expression would make


class NotComparable(Exception):
    """The text cannot be read as mathematics, or is too big to evaluate; the message says which."""


def refuse_huge(value: Any) -> None:
    """Raise NotComparable if evaluating a parsed expression would make a number of more than MAX_DIGITS digits."""
    from sympy import Basic

    if isinstance(value, Basic):
        _log10(value)


def _log10(node: Any) -> float:
    """Return an upper bound of |log10 |node|| for what is made of numbers, at least 1 for anything else."""
    from sympy import Add, Integer, Mul, Pow, Rational, binomial, factorial

    if isinstance(node, Rational):
        size = max(math.log10(max(abs(node.p), 1)), math.log10(node.q))
    else:
        parts = [_log10(part) for part in node.args]
        if isinstance(node, Pow):
            size = max(parts[0], 1.0) * _exponent(node.args[1], parts[1])
        elif isinstance(node, factorial | binomial):
            number = float(node.args[0]) if isinstance(node.args[0], Integer) else _whole(node.args[0], parts[0])
            size = abs(number) * max(parts[0], 1.0)
        elif isinstance(node, Mul):
            size = sum(parts)
        elif isinstance(node, Add):
            size = max(parts, default=1.0) + math.log10(len(parts) or 1)
        else:
            size = max(parts, default=1.0)
    if size > MAX_DIGITS:
        raise NotComparable(f"it would make a number of more than {MAX_DIGITS} digits")
    return size


def _exponent(node: Any, log10: float) -> float:
    """Return by how much a power's exponent multiplies digits: sympy multiplies powers of rational exponents out."""
    from sympy import Rational

    return abs(float(node)) if isinstance(node, Rational) else _whole(node, log10)


def _whole(node: Any, log10: float) -> float:
    """Return a bound of an expression's value if it is made of integers alone, else 1: it stays symbolic."""
    from sympy import Integer

    atoms = node.atoms()
    return 10 ** min(log10, 300.0) if atoms and all(isinstance(atom, Integer) for atom in atoms) else 1.0
