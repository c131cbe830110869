"""The preloaded libraries of programs, and the limits on the system RAM that they hold."""
