"""OpenAI's API as data: requests are parsed here, replies are written and read here, once for all.

`live/api`, `live/drive`, `live/worker` and `live/replay` call it. Nothing here opens a connection
or knows an instance.
"""
