"""Fixtures and settings for all tests: hypothesis profiles, threads, the embedded model.

LLMPPL_FULL=1 (`make check`) selects the full counts; without it the quick profile runs (tests/helpers/common.py).
"""

import gc
import os
import signal

import pytest
from helpers.common import FULL, ROOT
from hypothesis import settings

settings.register_profile("quick", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=500, deadline=None)
settings.load_profile("full" if FULL else "quick")

os.environ.setdefault("HF_HUB_OFFLINE", "1")        # no test needs a network
os.environ.setdefault("MPLBACKEND", "Agg")
folders = sorted({str(path.parent) for path in (ROOT / "tests").rglob("test_*.py")})
inherited = filter(None, [os.environ.get("PYTHONPATH")])
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *folders, *inherited])  # of subprocesses

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # as a shell leaves it to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:             # one thread a worker, or they fight over the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def older_objects():
    """Keep the objects of earlier tests out of `gc.collect()`, which otherwise takes seconds late in a run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def embedded():
    """The language model that ships with the package, run by transformers and loaded once a process."""
    from llmppl.lm.transformer import CachedTransformer

    return CachedTransformer.from_pretrained(engine="transformers")
