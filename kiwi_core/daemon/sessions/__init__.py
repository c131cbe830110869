"""What clients and libraries ask for, and sessions that come, go, are orphaned or recovered."""
