"""How long each waiter is expected to wait."""
