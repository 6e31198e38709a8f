"""Models of transformers with MKA's layers: conversion, classes for AutoModel, groups of parameters."""

from longreach.adapters.transformers.mka.convert import convert, revert
from longreach.adapters.transformers.mka.families import FAMILIES, PREFIX, family, options_of, register
from longreach.adapters.transformers.mka.training import parameter_groups

__all__ = ["FAMILIES", "PREFIX", "convert", "family", "options_of", "parameter_groups", "register", "revert"]
