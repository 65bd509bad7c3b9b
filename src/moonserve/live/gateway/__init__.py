"""The gateway: OpenAI's API in front of whatever implements ports.Serving.

`openai` judges requests, `generation` turns token ids into replies, `app` joins them to routes. The
process around it adds the Conductor, the store master and their routes.
"""
