"""What people see of decisions and runs: text made from plain data.

Imports core only. Nothing here decides, waits or listens.
"""
