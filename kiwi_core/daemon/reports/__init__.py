"""What people and programs are told: status, usage, metrics."""
