"""What every part speaks: the Tinker wire format, types, the configuration, and the tiny model of demo and tests. Knows no
other part of skyrl."""
