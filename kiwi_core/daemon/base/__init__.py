"""What every part of the daemon stands on: sockets, connections, peers and their shares, steps."""
