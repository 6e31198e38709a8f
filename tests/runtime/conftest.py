"""The plans of the tests of methods, and memory poisoned with NaN, here too."""

from tests.methods.conftest import _nan_memory, _planned, plans_of_tests

__all__ = ["_nan_memory", "_planned", "plans_of_tests"]
