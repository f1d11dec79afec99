"""What mixes rows of a sequence, over packed rows: attention, and layers whose state runs along the sequence."""
