"""The path of events to the scheduler, and of its orders to clients, the pager and the journal."""
