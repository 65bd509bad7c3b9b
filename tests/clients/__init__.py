"""Real clients before a gateway: see the marker `clients`, and its make targets."""
