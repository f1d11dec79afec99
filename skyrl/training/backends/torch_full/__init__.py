"""The torch backend for full fine-tuning: all parameters of one model are trained, on one device or on ranks."""
