"""Replacements of real parts for tests. Nothing that runs for users imports this package."""
