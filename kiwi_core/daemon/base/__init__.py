"""The basis of all other parts of the daemon: sockets, connections, peers, shares, steps."""
