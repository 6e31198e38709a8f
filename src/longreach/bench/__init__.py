"""Named measurements: cases, fair timing, baselines in the same run, targets. See benchmarks/README.md."""
