"""The small language model that ships with the package: `PATH` is a folder that `from_pretrained` reads.

What it was trained on, and what it can and cannot do: docs/embedded-model.md.
"""

import hashlib
from pathlib import Path

PATH: Path = Path(__file__).parent


def verify(folder: Path = PATH) -> None:
    """Compare the weights in `folder` with their checksum, model.safetensors.sha256; ValueError if they differ."""
    weights = folder / "model.safetensors"
    expected = weights.with_suffix(".safetensors.sha256").read_text(encoding="utf-8").split()[0]
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"the weights of the embedded model are damaged: the SHA-256 of {weights} is {found[:12]}..., not "
            f"{expected[:12]}... as shipped; install llmppl again (pip install --force-reinstall --no-deps llmppl)"
        )
