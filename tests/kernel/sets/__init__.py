"""Cells as people write them, which measure the cell analysis; see ``test_sets.py``."""
