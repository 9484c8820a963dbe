"""Equality of two mathematical expressions, decided by math-verify in a process of its own.

Parsing and simplifying can take unlimited time and memory, for example on a tower of powers. A comparison has
a limit of CPU seconds and of memory, so a busy machine changes no result. At the limit it is not equal: the
kernel ends the process, and the next comparison starts another one. The process ends with the one that
started it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import regex

from rlhf_core.errors import InfrastructureError
from rlhf_core.system.processes import launch, python_module

log = logging.getLogger(__name__)

CPU_SECONDS = 3
"""Limit of one comparison. Those of real answers take 0.005 to 0.1 s."""
_MEMORY_BYTES = 2 << 30
_LONGEST = 500
"""Longer expressions are not compared."""
_FUNCTIONS = r"sin|cos|tan|cot|sec|csc|log|exp|max|min|gcd|lcm|mod|arcsin|arccos|arctan|sinh|cosh|tanh"
_COMMAND = regex.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
_WORDS = regex.compile(rf"(?!(?:{_FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}")
_DECIMAL = regex.compile(r"(\d*)\.(\d+)")
# What makes a text an expression, so that `no` is not the product of n and o.
_MATHEMATICAL = regex.compile(r"[\d\\+*/^=<>|-]")
# `12_7` is a number to the base 7, which math-verify reads as 12; a number of 100 digits is no answer.
_UNREADABLE = regex.compile(r"\d_|\d{100}|[^\x20-\x7e]")


# The samples of a group often have the same answer, and a comparison takes up to 0.1 s.
@lru_cache(maxsize=4096)
def equal(given: str, wanted: str) -> bool:
    """Return whether two texts in LaTeX are equal expressions: exactly, for all values of their variables.

    Numbers are not rounded. A text that is no expression is equal to nothing.
    """
    if not (_is_expression(given) and _is_expression(wanted)) or _differ_in_case(given, wanted):
        return False
    found = _comparer(os.getpid()).compare(given, wanted)
    if found is None:
        log.warning("the comparison of %r with %r needs too much time or memory: not equal", given, wanted)
    return bool(found)


def _is_expression(text: str) -> bool:
    plain = _COMMAND.sub(" ", text)
    if len(text) > _LONGEST or _UNREADABLE.search(text):
        return False
    return bool(_MATHEMATICAL.search(text)) and not _WORDS.search(plain)


def _differ_in_case(given: str, wanted: str) -> bool:
    """Return whether a variable is a capital letter in one text only. math-verify ignores the case."""
    left, right = set(_COMMAND.sub("", given)), set(_COMMAND.sub("", wanted))
    return any(each.swapcase() in right and each not in right for each in left if each.isalpha())


class _Comparer:
    """The process, and the socket to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # Sets of symbols must have the same order in each run.
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        command = [*python_module("rlhf_core.data.expressions"), str(theirs.fileno())]
        # `makefile` has a reference of its own: the socket closes with the channel, and not here.
        with theirs, ours:
            self._process = launch(command, os.environ | own, pass_fds=(theirs.fileno(),))
            self._channel = ours.makefile("rw", encoding="utf-8")

    def compare(self, given: str, wanted: str) -> bool | None:
        """Return whether they are equal; None at the limit.

        Raises InfrastructureError if the process has ended for another reason.
        """
        # Replies have no number: of two threads, each could read the reply to the other one.
        with self._lock:
            try:
                self._channel.write(json.dumps([given, wanted]) + "\n")
                self._channel.flush()
                reply = self._channel.readline()
            except OSError:
                reply = ""
            if reply:
                decided: bool | None = json.loads(reply)
                return decided
            status = self._process.wait(timeout=60)  # it has closed its end of the socket
            self._start()
        if status != -signal.SIGPROF:
            raise InfrastructureError(
                f"the process that compares mathematical expressions has ended with exit status {status}"
            )
        return None


@cache
def _comparer(_process: int) -> _Comparer:
    """Return the comparer of this process. A process that was forked has one of its own."""
    return _Comparer()


# -- in the process --


def main(descriptor: int) -> None:
    """Compare pairs of expressions until the other end of the socket is closed."""
    logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off
    _equal("(x+1)^2", "x^2+2x+1")  # the imports belong to no comparison
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # The pipe is broken if the other process ends during a comparison.
    with suppress(BrokenPipeError), socket.socket(fileno=descriptor) as channel:
        for line in channel.makefile("r", encoding="utf-8"):
            # The signal ends the process, also inside of a library that is not written in Python.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                reply: bool | None = _equal(*json.loads(line))
            except (MemoryError, RecursionError):
                reply = None
            except Exception:  # what sympy raises about what it cannot compare has no common class
                reply = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.sendall(json.dumps(reply).encode() + b"\n")


def _equal(given: str, wanted: str) -> bool:
    from sympy.core.relational import Relational

    left, right = _parsed(given), _parsed(wanted)
    if left is None or right is None:
        return False
    if isinstance(left, Relational) or isinstance(right, Relational):
        return isinstance(left, Relational) and isinstance(right, Relational) and _same_relation(left, right)
    if _differ(left, right):
        return False
    from math_verify import verify

    # Of the default precision, 10^{-20} and 10^{-30} are equal.
    return bool(verify(right, left, numeric_precision=100, timeout_seconds=None))


def _differ(left: Any, right: Any) -> bool:
    """Return whether two expressions have different values at one point. Otherwise their difference must be
    simplified, which takes 10 to 1,000 times as long.
    """
    from sympy import Expr, Rational

    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return False
    variables = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {variable: Rational(17 + 6 * i, 7 + 4 * i) for i, variable in enumerate(variables)}
    try:
        # At a point of fractions and with 40 digits, rounding stays far below the bound in the next line.
        value, difference = (each.subs(point).evalf(40) for each in (left, left - right))
        return bool(difference.is_finite and abs(difference) > 1e-25 * (1 + abs(value)))
    except Exception:  # no value there, such as a logarithm of 0
        return False


def _parsed(text: str) -> Any:
    """Return the expression, with fractions instead of decimals, which math-verify would round; or None."""
    from math_verify import LatexExtractionConfig, parse

    exact = _DECIMAL.sub(lambda found: rf"(\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}})", text)
    # `1,234` would be a number.
    exact = exact.replace(",", ", ")
    reading = [LatexExtractionConfig(boxed_match_priority=-1)]
    found = parse(f"${exact}$", reading, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _same_relation(left: Any, right: Any) -> bool:
    """Return whether one relation is a multiple of the other. math-verify compares the solutions, which are
    equal for all equations that have none.
    """
    from sympy import Eq, Ge, Gt, Ne, simplify

    if isinstance(left, Gt | Ge):
        left = left.reversed
    if isinstance(right, Gt | Ge):
        right = right.reversed
    ratio = simplify((left.lhs - left.rhs) / (right.lhs - right.rhs))
    if type(left) is not type(right) or not ratio.is_number:
        return False
    return bool(ratio.is_positive or (ratio.is_negative and isinstance(left, Eq | Ne)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
