"""The daemon of one GPU: a thin shell around the pure scheduler, and its supervisor."""
