"""Checks the files of pictures in a process of their own, so that no file can stop or swell the process that asks."""
