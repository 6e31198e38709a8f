"""One method = one name = one file. base.py defines a method, registry.py lists them."""
