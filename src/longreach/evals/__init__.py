"""Measurements of models and methods, for the command line."""
