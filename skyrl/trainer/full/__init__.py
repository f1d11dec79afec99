"""Full fine-tuning: the parameters of the one model in training, and its files."""
