"""`python -m telescope env SUBCOMMAND`: look at environments and at what they have played. No run is started."""
