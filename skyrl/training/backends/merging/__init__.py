"""The process of `skyrl adapter`: an adapter merged into its base model, or without its lm_head."""
