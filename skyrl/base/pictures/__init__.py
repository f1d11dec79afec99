"""Pictures in prompts: what one is, which models see them, how one is opened."""
