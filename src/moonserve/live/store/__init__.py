"""The store's live rooms: the master as a service, and the client that workers hold."""
