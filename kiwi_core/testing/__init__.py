"""What tests put in the place of the real parts. Nothing that runs for users imports it."""
