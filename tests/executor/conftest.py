"""Models that many of these tests run plans of, made once for each file."""

from __future__ import annotations

import pytest

from tests.support.plans import Case, cnn_case, gpt_case, mlp_case


@pytest.fixture(scope="module")
def gpt() -> Case:
    return gpt_case()


@pytest.fixture(scope="module")
def mlp() -> Case:
    return mlp_case()


@pytest.fixture(scope="module")
def cnn() -> Case:
    return cnn_case()
