"""Other dialects than OpenAI's chat completions, turned into chat completions and back."""
