"""The benchmark of MagicPIG's decode attention."""
