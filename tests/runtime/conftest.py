"""The plans of the tests of methods, here too."""

from tests.methods.conftest import *  # noqa: F403
