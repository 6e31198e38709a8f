"""Models of transformers with MKA's layers: conversion, classes for AutoModel, groups of parameters."""

from longreach.adapters.transformers.mka.baselines import register_baselines
from longreach.adapters.transformers.mka.convert import check_convert, convert, revert
from longreach.adapters.transformers.mka.families import FAMILIES, PREFIX, family, options_of, register_families
from longreach.adapters.transformers.mka.training import parameter_groups

__all__ = [
    "FAMILIES",
    "PREFIX",
    "check_convert",
    "convert",
    "family",
    "options_of",
    "parameter_groups",
    "register",
    "revert",
]


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM load and make models with MKA's layers or MLA. May be called again."""
    register_families()
    register_baselines()
