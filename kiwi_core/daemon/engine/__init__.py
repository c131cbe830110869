"""Events to the scheduler; its orders to clients, the pager and the journal; what looks find."""
