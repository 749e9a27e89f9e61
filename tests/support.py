"""What several test files share, as plain functions: `from support import repetitions`."""

import os

FULL = os.environ.get("LLMPPL_FULL", "") not in ("", "0")


def repetitions(full: int, quick: int) -> int:
    """How often to repeat a random experiment: `full` under LLMPPL_FULL=1 (`make check`), else `quick`."""
    return full if FULL else quick
