"""A model's files: how they are found, their configuration and weights.

It never imports torch, because the gateway reads models too.
"""
