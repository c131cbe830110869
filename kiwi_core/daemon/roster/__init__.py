"""The sessions of a daemon, and the file that a restarted daemon finds them in."""
