"""The pure protocol: messages, framing, and what is legal when."""
