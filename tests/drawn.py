"""How property tests draw: always the same few examples, or as many new ones as GEMM_TEST_EXAMPLES says."""

import os

import pytest

hypothesis = pytest.importorskip("hypothesis")
HealthCheck, settings = hypothesis.HealthCheck, hypothesis.settings

_EXAMPLES = int(os.environ.get("GEMM_TEST_EXAMPLES", "0"))


def examples(count: int) -> settings:
    """``count`` examples, unless the environment asks for more."""
    return settings(
        max_examples=_EXAMPLES or count,
        derandomize=not _EXAMPLES,
        database=None,
        deadline=None,
        # A folder of the test is made once for all examples, each of which writes its own file there.
        suppress_health_check=list(HealthCheck),
    )
