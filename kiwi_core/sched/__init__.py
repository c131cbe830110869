"""The pure scheduler of one GPU: events in, actions out; no clock, no socket, no thread."""
