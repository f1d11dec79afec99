"""vLLM: its command line and placement, its adapters and health, what runs beside it on its node and inside it.

Knows how vLLM is started, told and watched. Knows neither the database nor who asks for samples.
"""
