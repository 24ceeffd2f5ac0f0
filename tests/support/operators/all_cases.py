"""All cases of operators by name: each module of them registers its own when it is imported."""

from __future__ import annotations

from tests.support.operators import convolution_cases, kernel_cases
from tests.support.operators.cases import CASES as CASES

REGISTERED = convolution_cases, kernel_cases
