"""The simulator: the same core on a heap with a virtual clock, fed by traces.

Imports core only. Nothing here waits, listens or asks the time; whatever looks random has a seed.
"""
