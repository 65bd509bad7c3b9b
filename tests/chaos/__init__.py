"""Faults in and between the processes of a real cluster, under streams that are checked."""
