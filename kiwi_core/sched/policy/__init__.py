"""Policies: who is next, who goes out, for how long, who may run beside whom."""
