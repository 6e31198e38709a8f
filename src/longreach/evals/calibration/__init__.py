"""Calibration: a model reads prompts, and the numbers for a kind of plan are gathered as they pass.

`prompts` makes the prompts, `gather` reads them and keeps a journal, `run` puts both together and makes the plan, from
the command line and from Python. Each kind of plan has a file with its `Gather` and its options (`base.Calibration`)
here, and its pure functions in methods/<kind>/calibrate.py.
"""
