"""The handlers of all events, and the settle pass that decides after each event."""
