"""The environment of the tests: which versions it can have."""

import pytest

from support import environment


def test_unknown_versions_are_an_error_that_names_the_known_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("INT8_DIT_VERSIONS", "nightly")
    monkeypatch.setenv("INT8_DIT_CACHE", str(tmp_path))
    with pytest.raises(environment.PrepareError, match="nightly; it can be tested or newest"):
        environment.prepare()
