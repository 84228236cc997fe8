"""Fixtures for tests of environments."""

import contextlib

import pytest


@pytest.fixture
def closing():
    """Registers an environment to be closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda environment: stack.enter_context(contextlib.closing(environment))
