"""Text to tokens and back: tokenizer, chat template, incremental detokeniser, stop strings.

The gateway uses it; the worker uses the stop matcher too. It uses no torch, no network and no event
loop.
"""
