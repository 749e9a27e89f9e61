"""Nothing heavy is imported before it is needed."""

import subprocess
import sys


def modules_after(statements: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `statements`."""
    program = f"{statements}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_importing_llmppl_loads_neither_torch_nor_transformers_nor_numba():
    loaded = modules_after("import llmppl\nllmppl.Bernoulli, llmppl.Geometric")
    assert "llmppl" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "numba"})
