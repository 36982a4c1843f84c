"""Telescope beside other systems: one command a peer, the same work for each, one file of figures a run."""
