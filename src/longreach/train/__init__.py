"""Training recipes of the models that longreach ships."""
