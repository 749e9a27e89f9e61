"""llguidance with limits, a stack of its own, and errors in one sentence.

llguidance recurses along the references of a schema. It runs in a thread with a large stack, so that the same schemas
work in each thread of the caller. `checks.check_references` refuses schemas that need a larger stack.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llmppl.support.locks import Lock

STACK = 1 << 28                                     # bytes; llguidance takes up to 4,000 for each level of a schema
LIMITS = {                                          # of llguidance; its own hold some 500 properties
    "max_items_in_row": 50_000,
    "step_max_items": 500_000,
    "initial_lexer_fuel": 20_000_000,
    "step_lexer_fuel": 2_000_000,
    "max_grammar_size": 2_000_000,
}

T = TypeVar("T")
_lock = Lock()


def llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("JsonSchema needs llguidance: pip install llmppl[json-schema]") from error
    return llguidance


def limits() -> Any:
    return llguidance().LLParserLimits(**LIMITS)


def in_large_stack(call: Callable[[], T]) -> T:
    """Return the result of a call in a thread with STACK bytes; the memory is taken only as it is used."""
    with ThreadPoolExecutor(1) as pool:
        with _lock.lock:                            # threads that start meanwhile elsewhere may get this stack as well
            before = threading.stack_size(STACK)
            try:
                future = pool.submit(call)
            finally:
                threading.stack_size(before)
        return future.result()


def error_of(schema: str) -> str:
    """Return the error of llguidance for a schema, "" if there is none."""
    matcher = llguidance().LLMatcher
    grammar = matcher.grammar_from_json_schema(schema)
    return reason(str(in_large_stack(lambda: matcher.validate_grammar(grammar, limits=limits()))))


def reason(message: str) -> str:
    """Return the message of llguidance without the parser's state and the trace of a panic."""
    text = re.split("<state>|<backtrace>", message)[0].strip()
    return "the schema has more symbols than its parser can number" if "symbols.len()" in text else text
