"""Running means of packed sequences: exponential moving averages and prefix means."""

from longreach.ops.carry import ScanCarry
from longreach.ops.scan.api import IMPLEMENTATIONS, scan

__all__ = ["IMPLEMENTATIONS", "ScanCarry", "scan"]
