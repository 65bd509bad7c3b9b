"""The OpenAI API: requests are checked and parsed, replies are written. Starts no call by
itself."""
