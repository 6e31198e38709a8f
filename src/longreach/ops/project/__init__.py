"""project: keys and queries in the first directions of a basis (Loki)."""

from longreach.ops.project.api import IMPLEMENTATIONS, PROJECT, pad_basis, project, project_keys

__all__ = ["IMPLEMENTATIONS", "PROJECT", "pad_basis", "project", "project_keys"]
