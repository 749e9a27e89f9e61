"""The small language model that ships with the package: `PATH` is a folder that `from_pretrained` reads.

Its training data and figures: README.md beside this file. Its abilities and limits: docs/embedded-model.md.
"""

import hashlib
from pathlib import Path

PATH: Path = Path(__file__).parent


AGAIN = "install llmppl again (pip install --force-reinstall --no-deps llmppl-smc)"


def verify(folder: Path = PATH) -> None:
    """Compare the weights in `folder` with model.safetensors.sha256; ValueError if they differ or one is not there."""
    weights = folder / "model.safetensors"
    checksum = weights.with_suffix(".safetensors.sha256")
    for file in (weights, checksum):
        if not file.is_file():
            raise ValueError(f"the embedded model is incomplete: {file} is not there; {AGAIN}")
    expected = checksum.read_text(encoding="utf-8", errors="replace")[:64]
    with weights.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"the weights of the embedded model are damaged: the SHA-256 of {weights} is {found[:12]}..., not "
            f"{expected[:12]}... as shipped; {AGAIN}"
        )
