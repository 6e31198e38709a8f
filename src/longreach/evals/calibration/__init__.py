"""Calibration: a model reads prompts, and what a kind of plan needs to know is taken from it as they pass.

`prompts` says what is read, `gather` reads it and keeps a journal, and each kind of plan has a file with its `Gather`
here and its pure functions in methods/<kind>/calibrate.py.
"""
