"""RULER's tasks (Hsieh et al., 2024, arXiv:2404.06654): structure, answer beginnings and scores as published."""
