"""What training backends on torch have in common. Not a backend: no settings live here."""
