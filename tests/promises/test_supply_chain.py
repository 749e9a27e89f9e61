"""What a release is made with, and what it carries: pinned actions, licences, the notices of the training data."""

import re
import tomllib
from pathlib import Path

import pytest
from helpers.common import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_commit_and_keep_no_credentials(path):
    text = path.read_text(encoding="utf-8")
    pinned = re.findall(r"uses: [\w/-]+@[0-9a-f]{40} +# v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert len(pinned) == text.count("uses: ") > 0
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert "\npermissions:\n  contents: read\n" in text and "pull_request_target" not in text


def test_licence_and_notice_name_the_shipped_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    named = {"model.safetensors", "TinyStories", "CDLA-Sharing", "Grimms", "FairytaleQA", "fiction of the 1880s"}
    assert {each for each in named if each in notice} == named
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_a_wheel_contains_licence_and_notice(tmp_path):
    builder = pytest.importorskip("hatchling.builders.wheel", reason="pip install hatchling")
    files = [each.distribution_path for each in builder.WheelBuilder(str(ROOT)).recurse_included_files()]
    licences = [Path(each).name for each in builder.WheelBuilder(str(ROOT)).metadata.core.license_files]
    assert licences == ["LICENSE", "NOTICE"] and "llmppl/lm/embedded/model.safetensors" in files
