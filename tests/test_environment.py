"""The environment of the tests: which versions it can have, and whose pins count."""

import pytest

from support import environment

COMFYUI = "torch\nnumpy>=1.25.0\ncomfy-kitchen==0.2.31\ncomfy-aimdo==0.4.13\n\n# others:\nkornia>=0.7.1"


def test_the_newest_packages_count_before_comfyui_s_pins():
    kept = environment._without(COMFYUI, "newest").splitlines()
    assert kept == ["comfy-aimdo==0.4.13", "", "# others:", "kornia>=0.7.1"]


def test_the_tested_ones_are_those_that_comfyui_asks_for():
    assert environment._without(COMFYUI, "dev") == COMFYUI


def test_unknown_versions_are_an_error_that_names_the_known_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("INT8_DIT_VERSIONS", "nightly")
    monkeypatch.setenv("INT8_DIT_CACHE", str(tmp_path))
    with pytest.raises(environment.PrepareError, match="nightly; it can be tested or newest"):
        environment.prepare()
