"""Reports for people and programs: status, usage, metrics."""
