"""Access: which requests a process serves, by path, token, API key, Host and Origin."""
