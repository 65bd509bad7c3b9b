"""Several processes that serve clients, the one with the Conductor, and what they say to it."""
