"""What the bench's worker processes do; each class is a role, each public method an order."""
