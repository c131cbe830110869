"""Cells as people write them, by which the cell analysis is judged: see ``test_sets.py``."""
