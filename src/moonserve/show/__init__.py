"""Text about decisions and runs for people, made from plain data.

It imports core only. Nothing here decides, waits or listens.
"""
