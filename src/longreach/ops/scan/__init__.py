"""Running means of packed sequences: exponential moving averages and prefix means."""

from longreach.ops.scan.api import IMPLEMENTATIONS, ScanCarry, scan

__all__ = ["IMPLEMENTATIONS", "ScanCarry", "scan"]
