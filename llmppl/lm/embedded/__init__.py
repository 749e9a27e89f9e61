"""The small language model that ships with the package: `PATH` is a folder that `from_pretrained` reads.

What it was trained on, and what it can and cannot do: docs/embedded-model.md.
"""

from pathlib import Path

PATH: Path = Path(__file__).parent
