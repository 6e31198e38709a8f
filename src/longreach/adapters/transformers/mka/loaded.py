"""Check of a loaded checkpoint: it must hold exactly the weights that the model's config describes."""

from __future__ import annotations

from typing import Any

from longreach.errors import ModelFileError


def check_loaded(path: Any, info: dict[str, Any], name: str, module: str) -> None:
    """Raise ModelFileError where weights of `name` (MKA, MLA) are missing, have another shape or belong to no layer.

    info: as `from_pretrained` returns it with output_loading_info. module: part of the names of these weights.
    """
    wrong = {
        "are missing from its weights": info["missing_keys"],
        "have another shape than its config.json describes": [key for key, *_ in info["mismatched_keys"]],
        "belong to no layer that its config.json describes": info["unexpected_keys"],
    }
    for what, keys in wrong.items():
        found = sorted(key for key in keys if module in key)
        if found:
            raise ModelFileError(
                f"{path}: {len(found)} tensors of {name} {what}, such as {found[0]}; weights and config.json do not "
                f"belong together: fetch the model again, or convert the original with longreach.convert"
            )
