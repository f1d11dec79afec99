"""The engine process: runs each model's commands in order, and models in turn.

Knows the database, the checkpoint store, the trainer by its interface and the inference servers; knows neither HTTP
routes nor chats.
"""
