"""One request through foreign engines: bodies pass through, and the text is the engine's."""
