"""The work of the bench's worker processes: each class is a role, each public method an order."""
