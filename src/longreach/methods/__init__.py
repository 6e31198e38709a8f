"""One method = one name = one file. base.py holds what a method is, registry.py who they are."""
