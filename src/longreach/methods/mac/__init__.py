"""MAC: results of attention reused by rows whose queries are alike."""

from longreach.methods.mac.method import MAC

__all__ = ["MAC"]
