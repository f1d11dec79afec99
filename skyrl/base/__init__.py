"""What every part speaks: the Tinker wire, shared types, the configuration and the tiny model. Knows no other door."""
