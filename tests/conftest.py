"""Fixtures and settings for all tests: hypothesis profiles, threads, the embedded model.

LLMPPL_FULL=1 (`make check`) selects the full counts; without it the quick profile runs (tests/helpers/common.py).
LLMPPL_EXTRAS=1 (`.ci/run`) fails a session that skips a test for want of a package: `make extras` installs them all.
"""

import gc
import os
import re
import signal

import pytest
from helpers.common import FULL, ROOT
from hypothesis import settings

settings.register_profile("quick", max_examples=24, deadline=None, derandomize=True)
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


WANTS_A_PACKAGE = re.compile(r"could not import|pip install|is not installed|make extras")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """With LLMPPL_EXTRAS=1, fail if a test was skipped for want of a package, and name the test and the package."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or "LLMPPL_EXTRAS" not in os.environ:
        return
    for report in reporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        if WANTS_A_PACKAGE.search(reason):
            reporter.write_line(f"LLMPPL_EXTRAS=1, but {report.nodeid} was skipped: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


GROWTH = 1.25                                           # of the objects, after which all of them are collected


def pytest_collection_finish(session):
    session.num_frozen = 0
    freeze(session)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Keep the objects of earlier files out of `gc.collect()`, which otherwise takes seconds late in a run."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        freeze(item.session)
    return result


def freeze(session):
    """Freeze all objects, after a full collection if there are many more of them than after the last one."""
    gc.unfreeze()
    gc.freeze()
    if gc.get_freeze_count() > GROWTH * session.num_frozen:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        session.num_frozen = gc.get_freeze_count()


@pytest.fixture(scope="session")
def embedded():
    """The language model that ships with the package, run by transformers and loaded once a process."""
    from llmppl.lm.transformer import CachedTransformer

    return CachedTransformer.from_pretrained(engine="transformers")
