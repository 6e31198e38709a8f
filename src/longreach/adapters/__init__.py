"""Doors to other libraries. Each folder is the only importer of the library it is named after."""
