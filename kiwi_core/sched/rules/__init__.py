"""What each event changes, and what the settle pass decides after it."""
