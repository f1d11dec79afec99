"""`skyrl capacity`: starts a server of its own on a base model, measures it on this machine, and ends it."""
