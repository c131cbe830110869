"""The preloaded libraries of programs, and the system RAM that they may hold."""
