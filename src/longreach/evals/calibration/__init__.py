"""Calibration: a model reads prompts, and the numbers for a kind of plan are gathered as they pass.

`prompts` makes the prompts, `gather` reads them and keeps a journal, and each kind of plan has a file with its `Gather`
here and its pure functions in methods/<kind>/calibrate.py.
"""
