"""The expected wait of each waiter."""
