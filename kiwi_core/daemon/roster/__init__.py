"""The sessions of a daemon, and the file from which a restarted daemon recovers them."""
