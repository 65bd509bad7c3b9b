"""Calls, replies and notices between the processes of one cluster, as msgpack frames."""
