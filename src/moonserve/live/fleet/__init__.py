"""Foreign engines: which there are, how they are, and what the Conductor is told of them."""
