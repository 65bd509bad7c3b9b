"""A model's files: finding, configuration and weights. No torch here: the gateway reads it too."""
